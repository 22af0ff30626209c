# SPDX-License-Identifier: Apache-2.0
"""Real ranks that capture prefill graphs of sizes which an attention group can share equally, and of others."""

from __future__ import annotations

import functools
from typing import Any

from cpu_sglang import prefill, ranks
from tests.scenarios import data_parallel, telling

WITHOUT = {"dp_size": 1, "enable_dp_attention": False}
# number of ranks, arguments of the server, and the sizes given
SERVERS: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "groups of two, odd sizes": (4, {}, [5, 7, 8, 11]),
    "groups of two, even sizes": (4, {}, [6, 16]),
    "groups of one": (2, {}, [5, 7, 11]),
    "no data parallel attention": (2, WITHOUT, [5, 7, 11]),
}


def serve(server: str, rank: ranks.Rank) -> dict[str, Any]:
    _, server_args, sizes = SERVERS[server]
    loaded = data_parallel.load(rank, "Qwen3ForCausalLM", **server_args)
    expected = data_parallel.answer(loaded, rank, 2)
    runner = prefill.capture_prefill(loaded.model_runner, sizes)
    is_replayed, right = data_parallel.judged(lambda: data_parallel.answer(loaded, rank, 2), expected)
    return {"sizes": sorted(prefill.captured_graphs(runner)), "replayed": is_replayed, "right": right}


def main() -> None:
    data_parallel.prepare()
    telling.result({name: data_parallel.of_each(of[0], functools.partial(serve, name)) for name, of in SERVERS.items()})


if __name__ == "__main__":
    main()
