# SPDX-License-Identifier: Apache-2.0
"""Two real ranks that vote on replaying a prefill graph, one of them with a batch that no graph is replayed for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from cpu_sglang import one_batch, prefill, ranks
from tests.scenarios import data_parallel, telling

# both ranks load in half of it; then they wait for each other
SECONDS = 100
EMBEDDINGS, LONG = "embeddings", "long context"
# the ranks have prompts of 5, and of 6 and 5 tokens
LONGEST = 5


def serve(batch: str, rank: ranks.Rank) -> list[Any]:
    loaded = data_parallel.load(rank, "Qwen3ForCausalLM")
    expected = [answer(loaded, rank, batch), data_parallel.answer(loaded, rank, 1)]
    # without a graph the ranks pad to 11 tokens, which no graph has
    runner = prefill.capture_prefill(loaded.model_runner, [8, 16])
    if batch == LONG:
        limit(runner, LONGEST)
    first = told(lambda: answer(loaded, rank, batch), expected[0])
    if batch == LONG:
        limit(runner, None)
    return [first, told(lambda: data_parallel.answer(loaded, rank, 1), expected[1])]


def told(act: Callable[[], Any], expected: Any) -> list[Any]:
    is_replayed, right = data_parallel.judged(act, expected)
    return ["replayed" if is_replayed else "eager", right]


def answer(loaded: one_batch.LoadedModel, rank: ranks.Rank, batch: str) -> Any:
    """Logits of this rank's prompts, where the first rank's have an embedding of their own if that is asked for."""
    benchmark = loaded.benchmark
    prepare = benchmark.prepare_synthetic_inputs_for_latency_test

    def prepare_with_embeddings(*arguments: Any) -> Any:
        from sglang.srt.managers.embed_types import PositionalEmbeds

        requests = prepare(*arguments)
        for request in requests:
            embedding = torch.ones(1, loaded.model_runner.model_config.hidden_size)
            request.positional_embed_overrides = PositionalEmbeds(embeds=embedding, positions=[2])
        return requests

    if batch == EMBEDDINGS and rank.number == 0:
        benchmark.prepare_synthetic_inputs_for_latency_test = prepare_with_embeddings
    try:
        return data_parallel.answer(loaded, rank, 1)
    finally:
        benchmark.prepare_synthetic_inputs_for_latency_test = prepare


def limit(runner: Any, longest: int | None) -> None:
    """Ask what DeepSeek-V4.1's attention asks of each batch, with this limit."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    prefill._graph_config(runner.model_runner).prefill.max_seq_len = longest
    owner: Any = SimpleNamespace(enable_decoder_swa_bounded_replay=False)
    runner._backend_can_run_prefill_cuda_graph = functools.partial(
        DeepseekV4AttnBackend.can_run_prefill_cuda_graph, owner
    )


def of_each(batches: list[str]) -> dict[str, Any]:
    return {batch: data_parallel.of_each(2, functools.partial(serve, batch), SECONDS) for batch in batches}


def main() -> None:
    data_parallel.prepare()
    telling.with_and_without(lambda: of_each(sys.argv[1:]))


if __name__ == "__main__":
    main()
