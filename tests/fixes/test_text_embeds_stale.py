"""A model with a slot for embeddings that hands its layers token ids: the real runner, capture and replay."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json
from sglang_on_cpu import graphs, one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang_bcg_fixes.plugin import load

loaded = one_batch.load("llama")
runner = loaded.model_runner
one_batch.randomize(runner.model)
runner.is_multimodal = runner.model_config.is_multimodal = True
batches = [prefill._prompts([6, 5]), prefill._prompts([9])]
eager = [one_batch.generate(loaded, prompts, 1)[1] for prompts in batches]

def replayed():
    prefill.capture_prefill(runner, (16,))
    before = graphs.counters.replays
    answers = [one_batch.generate(loaded, prompts, 1)[1] for prompts in batches]
    return [graphs.counters.replays > before, *(bool((one == other).all()) for one, other in zip(answers, eager))]

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": replayed()}
for name in applied:
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": replayed()}))
"""


@pytest.mark.parametrize("release", ["0.5.14", "0.5.20"])
def test_a_replay_has_the_embeddings_of_its_own_text(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_TEXT_EMBEDS_STALE": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["text_embeds_stale"]
    assert found["with"] == [True, True, True]
    # the buffer keeps what the last replay before left there: the embeddings of the second batch
    assert found["without"] == [True, False, True]
