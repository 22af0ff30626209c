# SPDX-License-Identifier: Apache-2.0
"""The mask of checkpoints that a replayed mixed batch hands to its layers, on the real runner."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from cpu_sglang import graphs, one_batch, prefill
from tests.releases import kinds_of_request
from tests.scenarios import released, telling


def tracked(batch: Any, model: Any) -> None:
    batch.mamba_track_mask, batch.mamba_track_indices = torch.tensor([True, True]), torch.tensor([5, 6])
    batch.mamba_track_seqlens = torch.tensor([4, 3], dtype=torch.int32)


def mixed(batch: Any, model: Any) -> None:
    batch.forward_mode = type(batch.forward_mode).MIXED
    assert batch.mamba_track_mask is None


def drops_the_mask(loaded: one_batch.LoadedModel) -> bool:
    """Mix a running request in as SGLang's scheduler does, and tell whether the mask is gone."""

    def requests(n: int) -> Any:
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


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    plain, seen = runner.model.forward, list[list[Any]]()

    def forward(input_ids: Any, positions: Any, forward_batch: Any, **kwargs: Any) -> Any:
        seen.append([forward_batch.mamba_track_mask.tolist(), forward_batch.mamba_track_indices.tolist()])
        return plain(input_ids, positions, forward_batch, **kwargs)

    def replay() -> list[Any]:
        seen.clear()
        before = graphs.counters.replays
        for change in (tracked, mixed):
            kinds_of_request.run(loaded, [4, 3], change)
        return [graphs.counters.replays > before, *seen]

    runner.model.forward = forward
    PrefillCudaGraphRunner._is_mamba_track_enabled = lambda self: True
    prefill.capture_prefill(runner)
    telling.with_and_without(replay, mixing_drops_the_mask=drops_the_mask(loaded))


if __name__ == "__main__":
    main()
