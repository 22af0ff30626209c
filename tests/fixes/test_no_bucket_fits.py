"""A server whose prefill graph sizes are all too large, as far as the real ModelRunner comes with it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import NEWEST

CODE = """
from cpu_sglang import one_batch, prefill
from tests.fixes import small_llama

loaded = small_llama.load()
runner = loaded.model_runner
prompts = prefill._prompts([6, 5])
eager = one_batch.generate(loaded, prompts, 2)[1]

def start():
    phase = prefill._graph_config(runner).prefill
    phase.backend, phase.bs = "breakable", [10**6]
    try:
        runner.init_prefill_cuda_graph()
    except AttributeError as error:
        return str(error)
    same = bool((one_batch.generate(loaded, prompts, 2)[1] == eager).all())
    return [type(runner.prefill_cuda_graph_runner).__name__, same]

small_llama.tell_with_and_without(start)
"""


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_the_server_starts_and_is_eager(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_NO_BUCKET_FITS": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["no_bucket_fits"]
    assert found["with"] == ["EagerRunner", True]
    assert found["without"] == "'EagerRunner' object has no attribute 'runner'"
