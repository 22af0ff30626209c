"""What a draft of Qwen3-Next makes of prompts and of its target's states, eagerly and replayed."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json
from sglang_on_cpu import one_batch
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang_bcg_fixes.plugin import load
from sglang_on_cpu.draft_prefill import Draft

LENGTHS = [6, 5], [11], [5, 4]
draft = Draft("qwen3next", one_batch.MODELS / "qwen3next")
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


@pytest.mark.parametrize("release", ["0.5.19", "0.5.21", "0.5.23"])
def test_a_replayed_draft_knows_the_states_of_its_target(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_DRAFT_STATES_DROPPED": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["draft_states_dropped"]
    # a graph is two segments round the one attention layer
    assert found["with"] == [[True, 2]] * 3
    assert found["without"] == [[False, 2]] * 3
