# SPDX-License-Identifier: Apache-2.0
"""Real ranks that capture prefill graphs of sizes which an attention group can share equally, and of others."""

from __future__ import annotations

import functools
from typing import Any

from cpu_sglang import graphs, prefill, ranks
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
    before = graphs.counters.replays
    found = data_parallel.answer(loaded, rank, 2)
    return {
        "sizes": sorted(prefill.captured_graphs(runner)),
        "replayed": graphs.counters.replays > before,
        "right": bool((found == expected).all()),
    }


def main() -> None:
    data_parallel.prepare()
    found: dict[str, Any] = {}
    for server, (number, *_) in SERVERS.items():
        try:
            found[server] = ranks.each(number, functools.partial(serve, server))
        except ranks.NotAllAnswered as error:
            found[server] = str(error)
    telling.result(found)


if __name__ == "__main__":
    main()
