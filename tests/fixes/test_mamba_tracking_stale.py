"""The mask of checkpoints that a replayed mixed batch hands to its layers: real scheduler batch, runner and buffers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
from cpu_sglang import graphs, prefill
from tests.fixes import small_llama

loaded = small_llama.load()
runner = loaded.model_runner
import numpy, torch
from tests.releases import kinds_of_request

model, seen = runner.model, []
plain = model.forward

def forward(input_ids, positions, forward_batch, **kwargs):
    seen.append([forward_batch.mamba_track_mask.tolist(), forward_batch.mamba_track_indices.tolist()])
    return plain(input_ids, positions, forward_batch, **kwargs)

def tracked(batch, model):
    batch.mamba_track_mask, batch.mamba_track_indices = torch.tensor([True, True]), torch.tensor([5, 6])
    batch.mamba_track_seqlens = torch.tensor([4, 3], dtype=torch.int32)

def mixed(batch, model):
    batch.forward_mode = type(batch.forward_mode).MIXED
    assert batch.mamba_track_mask is None

def drops_the_mask():
    "What SGLang's scheduler does to the mask when it mixes a running request in."
    def requests(n):
        prompt = numpy.arange(3, 3 + n, dtype=numpy.int32)
        return loaded.benchmark.prepare_synthetic_inputs_for_latency_test(1, n, [prompt])
    with torch.no_grad():
        loaded.runner.clear()
        tokens, _, running = loaded.runner.extend(requests(4))
        _, _, new = loaded.runner.extend(requests(5))
    running.output_ids = tokens
    new.mamba_track_mask, new.mamba_track_indices = torch.tensor([True]), torch.tensor([5])
    new.mamba_track_seqlens = torch.tensor([4])
    running.prepare_for_decode()
    new.mix_with_running(running)
    return new.mamba_track_mask is None

def replay():
    seen.clear()
    before = graphs.counters.replays
    for change in (tracked, mixed):
        kinds_of_request.run(loaded, [4, 3], change)
    return [graphs.counters.replays > before, *seen]

model.forward = forward
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
PrefillCudaGraphRunner._is_mamba_track_enabled = lambda self: True
prefill.capture_prefill(runner)
small_llama.tell_with_and_without(replay, mixing_drops_the_mask=drops_the_mask())
"""


@pytest.mark.parametrize("release", ["0.5.14", "0.5.22"])
def test_a_mixed_batch_writes_no_checkpoint(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_MAMBA_TRACKING_STALE": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["mamba_tracking_stale"]
    assert found["mixing_drops_the_mask"] is True
    replayed, earlier = True, [[True, True], [5, 6]]
    assert found["without"] == [replayed, earlier, earlier]
    assert found["with"] == [replayed, earlier, [[False, False], [5, 6]]]
