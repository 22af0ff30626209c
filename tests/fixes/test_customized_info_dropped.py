"""A model that adds something to its answer: does it come out of a real replay?"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
from cpu_sglang import graphs, one_batch, prefill
from tests.fixes import small_llama

loaded = small_llama.load()
runner = loaded.model_runner
answers, logits, run = [], runner.model.logits_processor.forward, runner.forward

def with_info(*args, **kwargs):
    answer = logits(*args, **kwargs)
    answer.customized_info = {"request": ["first", "second"]}
    return answer

def watched(*args, **kwargs):
    answer = run(*args, **kwargs)
    answers.append(getattr(answer, "logits_output", None) or answer[0])
    return answer

runner.model.logits_processor.forward, runner.forward = with_info, watched
prefill.capture_prefill(runner)

def replayed():
    before = graphs.counters.replays
    one_batch.generate(loaded, prefill._prompts([3, 4]), 1)
    return [answers[-1].customized_info, graphs.counters.replays > before, "forward" in vars(runner.model)]

small_llama.tell_with_and_without(replayed)
"""


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.20"])
def test_what_the_model_added_comes_out_of_a_replay(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_CUSTOMIZED_INFO_DROPPED": "on"}
    found, _ = processes.beside(release_root(release), "-c", CODE, **only)
    assert found["applied"] == ["customized_info_dropped"]
    assert found["with"] == [{"request": ["first", "second"]}, True, False]
    assert found["without"] == [None, True, False]
