# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention that return the experts of each prompt, eagerly and after replays."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch

from cpu_sglang import graphs, prefill, ranks
from tests.scenarios import data_parallel, telling

SERVERS: dict[str, dict[str, Any]] = {
    "data parallel attention": {},
    "none": {"dp_size": 1, "enable_dp_attention": False},
}


def serve(server: str, rank: ranks.Rank) -> list[Any]:
    from sglang.srt.state_capturer import base

    # the memory that experts are copied to is pinned, which takes CUDA
    vars(base)["ALLOC_MEMORY_FUNCS"] = {"cpu": lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)}
    loaded = data_parallel.load(rank, "Qwen3MoeForCausalLM", enable_return_routed_experts=True, **SERVERS[server])
    runner = loaded.model_runner
    tokens = sum(data_parallel.LENGTHS[rank.number if runner.server_args.dp_size > 1 else 0])
    module: Any = sys.modules["sglang.srt.state_capturer.routed_experts"]
    capturer = module.get_global_experts_capturer()
    seen: list[Any] = []
    on_forward_end = capturer.on_forward_end

    def watched(forward_batch: Any, **kwargs: Any) -> Any:
        on_forward_end(forward_batch=forward_batch, **kwargs)
        slots = forward_batch.out_cache_loc[:tokens]
        seen.append(capturer.host_cache.buffer[slots].tolist())

    capturer.on_forward_end = watched

    def experts() -> Any:
        # what an earlier prefill has left must not pass for an answer
        capturer.host_cache.buffer.fill_(-1)
        data_parallel.answer(loaded, rank, 1)
        return seen.pop()

    eager = experts()
    prefill.capture_prefill(runner)
    told = []
    # the rows of the last replayed decode graph: none yet, fewer than a prefill has, and more
    for rows in (None, 2, 64):
        runner.decode_cuda_graph_runner = SimpleNamespace(bs=rows)
        before = graphs.counters.replays
        try:
            found = experts()
        except (TypeError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            way = "replayed" if graphs.counters.replays > before else "eager"
            told.append(f"{way}, {'right' if found == eager else 'wrong'}")
    return told


def main() -> None:
    data_parallel.prepare()
    telling.with_and_without(lambda: {server: ranks.each(2, functools.partial(serve, server)) for server in SERVERS})


if __name__ == "__main__":
    main()
