# SPDX-License-Identifier: Apache-2.0
"""Rows that are a rank's own, computed by SGLang in a captured graph and read after a replay."""

from __future__ import annotations

from typing import Any

import torch

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import released, telling


def main() -> None:
    loaded = released.load("llama")
    runner = loaded.model_runner
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    layers, rows = runner.model.model.forward, dict[int, torch.Tensor]()

    def forward(input_ids: Any, positions: Any, forward_batch: Any, *rest: Any) -> Any:
        hidden = layers(input_ids, positions, forward_batch, *rest)
        if forward_batch.global_num_tokens_gpu is not None:
            rows[len(input_ids)] = torch.stack([item.long() for item in dp_attention.get_dp_local_info(forward_batch)])
        return hidden

    runner.model.model.forward = forward
    dp_attention.get_attention_dp_rank = lambda: 1
    graphs.freed_memory_is_garbage = True

    # what stands there is a default, so that a read-back sees that it is still called
    def of_two_ranks(self: Any, num_tokens: int, prepare: Any = PrefillCudaGraphRunner.capture_prepare) -> Any:
        self.require_mlp_tp_gather, self.dp_size = True, 2
        return prepare(self, num_tokens)

    PrefillCudaGraphRunner.capture_prepare = of_two_ranks
    prefill.capture_prefill(runner)
    captured, before = rows[8].tolist(), graphs.counters.replays
    one_batch.generate(loaded, prefill._prompts([6]), 1)
    telling.result([captured, rows[8].tolist(), graphs.counters.replays > before])


if __name__ == "__main__":
    main()
