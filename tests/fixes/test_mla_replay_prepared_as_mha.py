"""A tiny DeepSeek under breakable graphs of the release that prepares its replays wrongly."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import mla_replay_prepared_as_mha as fix
from tests import processes

CODE = """
import json
from sglang_on_cpu import one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang_bcg_fixes.plugin import load

ID, PROMPTS = "mla_replay_prepared_as_mha", [[5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
loaded = one_batch.load("deepseek_v2", attention_backend="fa3")
model = loaded.model_runner.model
one_batch.randomize(model)
# the absorbed weights are made from the others
model.post_load_weights()
tokens, logits = one_batch.generate(loaded, PROMPTS, 3)
prefill.capture_prefill(loaded.model_runner, (8, 16))
ledger = load().ledger
found = {"applied": ID in ledger.applied()}
again, replayed = one_batch.generate(loaded, PROMPTS, 3)
found |= {"same": again == tokens, "off": (replayed - logits).abs().max().item()}
ledger.undo(ID)
try:
    one_batch.generate(loaded, PROMPTS, 3)
except RuntimeError as error:
    found["error"] = str(error)
print("RESULT", json.dumps(found))
"""


def test_the_first_replay_is_answered_and_ends_the_server_without(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", fix.FIX.flag: "on"}
    found, _ = processes.beside(release_root("0.5.17"), "-c", CODE, **only)
    # the two forms round differently, in float16 and with logits of about 2
    assert found["applied"] and found["same"] and 0 < found["off"] < 0.005, found
    assert "is invalid for input of size" in found["error"]


@pytest.mark.parametrize(
    ("graphs", "attention", "companions"),
    [
        ("FullCudaGraphBackend", "fa3", True),
        ("BreakableCudaGraphBackend", "fa4", True),
        ("BreakableCudaGraphBackend", "fa3", False),
    ],
)
def test_other_graphs_backends_and_models_are_left_alone(graphs: str, attention: str, companions: bool) -> None:
    runner = types.SimpleNamespace(
        backend=type(graphs, (), {})(),
        has_mha_companion_layers=companions,
        model_runner=types.SimpleNamespace(prefill_attention_backend_str=attention),
    )
    # it would fail if it were asked for anything
    batch = object()
    assert fix.in_the_absorbed_form(batch, runner, "the batch") is batch
