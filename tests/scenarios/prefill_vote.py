# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention that vote on replaying a prefill graph, where there is one and not."""

from __future__ import annotations

import functools
import sys
from typing import Any

from cpu_sglang import graphs, one_batch, prefill, ranks
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.fixes import eager_runner_cannot_vote as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import data_parallel, telling

FIX = declared_in(fix)
LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj"], "lora_backend": "torch_native"}
# arguments of the server, and the sizes of its prefill graphs
SERVERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "LoRA": (LORA, [8, 16]),
    "sizes too large": ({}, [10**6]),
    "graphs": ({}, [8, 16]),
}


def serve(server: str, rank: ranks.Rank) -> list[Any]:
    server_args, sizes = SERVERS[server]
    loaded = data_parallel.load(rank, "Qwen3ForCausalLM", **server_args)
    expected, runner = answers(loaded, rank), loaded.model_runner
    phase = prefill._graph_config(runner).prefill
    phase.backend, phase.bs = "breakable", sizes
    runner.init_prefill_cuda_graph()
    before = graphs.counters.replays
    found = answers(loaded, rank)
    right = all(bool((one == other).all()) for one, other in zip(found, expected, strict=True))
    is_replayed = graphs.counters.replays > before
    return [type(runner.prefill_cuda_graph_runner).__name__, is_replayed, right]


def answers(loaded: one_batch.LoadedModel, rank: ranks.Rank) -> list[Any]:
    together = data_parallel.answer(loaded, rank, 2)
    if rank.number == 0:
        # a new prompt in each step, while the other rank decodes in the second
        return [together, *(data_parallel.answer(loaded, rank, 1) for _ in range(2))]
    return [together, data_parallel.answer(loaded, rank, 2)]


def main(servers: list[str]) -> None:
    data_parallel.prepare()
    ledger = plugin.load().ledger
    found: dict[str, Any] = {"applied": ledger.applied(), "with": of_each(servers)}
    if FIX.id in found["applied"]:
        # the other one stays: without it a server whose sizes are too large does not start
        ledger.undo(FIX.id)
        found["without"] = of_each(servers)
    telling.result(found)


def of_each(servers: list[str]) -> dict[str, list[Any]]:
    return {server: ranks.each(2, functools.partial(serve, server)) for server in servers}


if __name__ == "__main__":
    main(sys.argv[1:])
