# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention and MegaMoE's rules, whose dense layers gather tokens in the graph."""

from __future__ import annotations

import importlib
from typing import Any

from cpu_sglang import prefill, ranks
from tests.scenarios import data_parallel, telling

# both ranks load in half of it; then they wait for each other
SECONDS = 100


class MegaMoe:
    """The backend that is there, but for its name."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def is_megamoe(self) -> bool:
        return True


def serve(rank: ranks.Rank) -> list[Any]:
    utilities: Any = importlib.import_module("sglang.srt.layers.moe.utils")
    backend = utilities.get_moe_a2a_backend
    loaded = data_parallel.load(rank, "Qwen3ForCausalLM")
    # the rules for its graphs ask here
    utilities.get_moe_a2a_backend = lambda: MegaMoe(backend())
    expected = data_parallel.answer(loaded, rank, 1)
    # of 5 tokens and of 11
    prefill.capture_prefill(loaded.model_runner, [8, 16])
    return [*data_parallel.judged(lambda: data_parallel.answer(loaded, rank, 1), expected)]


def main() -> None:
    data_parallel.prepare()
    telling.with_and_without(lambda: data_parallel.of_each(2, serve, SECONDS))


if __name__ == "__main__":
    main()
