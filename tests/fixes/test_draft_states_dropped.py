"""What drafts of a model's own checkpoint make of prompts and of the target's states, eagerly and replayed."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.releases.test_hybrid_routing import QWEN3_5
from tests.wheels import NEWEST

CODE = """
import json, pathlib, sys
from cpu_sglang import one_batch
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang_bcg_fixes.plugin import load
from cpu_sglang.draft_prefill import Draft

LENGTHS = [6, 5], [11], [5, 4]
draft = Draft("qwen3next", pathlib.Path(sys.argv[1]))
eager = [draft.prefill(lengths)[0] for lengths in LENGTHS]

def replayed():
    draft.capture()
    answers = [draft.prefill(lengths) for lengths in LENGTHS]
    return [[bool((answer == other).all()), segments] for (answer, segments), other in zip(answers, eager)]

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": replayed()}
for name in applied:
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": replayed()}))
"""


MODELS = processes.REPOSITORY / "cpu_sglang" / "models"
TEXT_ONLY = QWEN3_5["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "torch_dtype": "float32"}
# a graph is two segments round the one attention layer
RIGHT, WRONG = [[True, 2]] * 3, [[False, 2]] * 3
# the release, the model that brings its draft, and what SGLang makes of it
CASES = {
    "0.5.19": ("0.5.19", "qwen3next", WRONG),
    "0.5.21": ("0.5.21", "qwen3next", WRONG),
    NEWEST: (NEWEST, "qwen3next", WRONG),
    f"{NEWEST}, text only": (NEWEST, TEXT_ONLY, WRONG),
    f"{NEWEST}, multimodal": (NEWEST, QWEN3_5, RIGHT),
}


@pytest.mark.parametrize(("release", "model", "stock"), CASES.values(), ids=CASES)
def test_a_replayed_draft_knows_the_states_of_its_target(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    release: str,
    model: str | dict[str, Any],
    stock: list[list[Any]],
) -> None:
    if isinstance(model, str):
        folder = MODELS / model
    else:
        folder = tmp_path
        (folder / "config.json").write_text(json.dumps(model))
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_DRAFT_STATES_DROPPED": "on"}
    found = processes.beside(release_root(release), "-c", CODE, str(folder), **only)[0]
    assert found["applied"] == ["draft_states_dropped"]
    assert found["with"] == RIGHT
    assert found["without"] == stock
