"""A tiny DeepSeek under breakable graphs of the release that prepares its replays wrongly."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import mla_replay_prepared_as_mha as fix
from tests import processes
from tests.wheels import NEWEST

PRELUDE = """
import json, sys
from cpu_sglang import graphs, one_batch, prefill
from tests.fixes.small_deepseek import PROMPTS, load as load_model, planned_by_tensorrt
loaded = load_model()
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.plugin import load

ID = "mla_replay_prepared_as_mha"
tokens, logits = one_batch.generate(loaded, PROMPTS, 3)
runner = prefill.capture_prefill(loaded.model_runner, (8, 16))
# as on an NVIDIA GPU: where it is false, captures are taken to be of the expanded form
sys.modules[type(runner).__module__].is_cuda = lambda: True
ledger = load().ledger
found = {"applied": ID in ledger.applied()}
again, replayed = one_batch.generate(loaded, PROMPTS, 3)
found |= {"same": again == tokens, "off": (replayed - logits).abs().max().item(), "replays": graphs.counters.replays}
"""
CODE = """
def plans():
    outside = planned_by_tensorrt()
    with graph_break.load("context").enable_breakable_cuda_graph():
        return {"eager": outside, "under a graph": planned_by_tensorrt()}

found["plans"] = plans()
ledger.undo(ID)
found["stock plans"] = plans()
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
    found, _ = processes.beside(release_root("0.5.17"), "-c", PRELUDE + CODE, **only)
    # the two forms round differently, in float16 and with logits of about 2
    assert found["applied"] and found["same"] and 0 < found["off"] < 0.005, found
    assert "is invalid for input of size" in found["error"]
    # TensorRT-LLM's kernels are not run here: they are for Blackwell alone
    assert found["plans"] == {"eager": [False], "under a graph": ["paged", True]}
    assert found["stock plans"] == {"eager": [False], "under a graph": [False]}


@pytest.mark.parametrize(("release", "form"), [("0.5.16", "expanded"), ("0.5.18", "absorbed"), (NEWEST, "absorbed")])
def test_the_releases_round_it_need_no_fix(
    release_root: Callable[[str], pathlib.Path], release: str, form: str
) -> None:
    found, _ = processes.beside(
        release_root(release), "-c", PRELUDE + 'print("RESULT", json.dumps(found))', SGLANG_BCG_FIXES="off"
    )
    assert not found["applied"] and found["same"] and found["replays"], found
    # eager prefill is of the expanded form
    assert found["off"] == 0 if form == "expanded" else 0 < found["off"] < 0.005, found


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
