# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that prefill graphs without breaks write for a smaller batch than the one before it.

A release's real prefill runner and its buffers. In place of a small model's own layers stands one that keeps a
checkpoint of each request with the kernel that Inkling's convolutions call.
"""

from __future__ import annotations

from typing import Any

import torch

from cpu_sglang import graphs, prefill
from tests.releases import kinds_of_request
from tests.scenarios import released, telling

BUCKETS, REQUESTS = (8, 16, 32), 4
# lengths of prompts, and the slots for their checkpoints, where the scheduler wants one
BATCHES: list[tuple[list[int], list[int | None]]] = [
    ([4, 4, 4, 4], [1, 2, 3, 4]),
    ([8, 9, 10], [5, None, 6]),
    ([6], [None]),
    ([11], [7]),
    ([8, 8], [None, 8]),
]


class Layers(torch.nn.Module):
    """The layers of a model, one of which saves the window at the end of each request that wants a checkpoint."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        from sglang.srt.models.inkling_common import sconv

        self.layers, self.embeddings = layers.layers, layers.embed_tokens
        self.save = sconv.fused_gather_scatter_to_sconv_cache
        self.saved = torch.zeros(10, 1, 4)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, *_: Any) -> Any:
        last = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).clamp(min=0)
        windows = positions.float()[:, None].repeat(1, 4)
        mask, slots = forward_batch.mamba_track_mask, forward_batch.mamba_track_indices
        self.save(windows, self.saved, last[:, None], mask, slots)
        return self.embeddings(input_ids)


def main() -> None:
    loaded = released.load("llama", dtype="float32", max_running_requests=REQUESTS)
    runner = loaded.model_runner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    PrefillCudaGraphRunner._is_mamba_track_enabled = lambda self: True
    layers = runner.model.model = Layers(runner.model.model)
    prefill.capture_prefill_whole(runner, BUCKETS, REQUESTS)

    def written(lengths: list[int], wanted: list[int | None]) -> list[int]:
        """Slots that a replay has written to."""

        def track(batch: Any, model: Any) -> None:
            batch.mamba_track_mask = torch.tensor([slot is not None for slot in wanted])
            batch.mamba_track_indices = torch.tensor([slot or 0 for slot in wanted])
            batch.mamba_track_seqlens = torch.tensor(lengths, dtype=torch.int32)

        layers.saved.fill_(-1)
        before = graphs.counters.replays
        kinds_of_request.run(loaded, lengths, track)
        assert graphs.counters.replays == before + 1
        return [slot for slot, window in enumerate(layers.saved.tolist()) if window != [[-1] * 4]]

    telling.with_and_without(lambda: [written(*batch) for batch in BATCHES])


if __name__ == "__main__":
    main()
