# SPDX-License-Identifier: Apache-2.0
"""Functions of SGLang's prefix cache that a scheduler calls, by prefix tree of the release.

A tiny hybrid model's conversations split nodes, find states and run out of room.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from cpu_sglang import scheduler
from tests.scenarios import telling, warm_answers

CACHE = "sglang.srt.mem_cache."
# at the beginning of every prompt
SHARED = 40
MODEL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SERVER = {"attention_backend": "torch_native", "max_mamba_cache_size": 20, "max_total_tokens": 600, "model": MODEL}


def call(served: scheduler.Scheduler, _: float) -> dict[str, list[str]]:
    """Name each of these functions as a fix names its target."""
    called = set[str]()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(CACHE):
            called.add(f"{module}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        for held in warm_answers.CONVERSATIONS.values():
            served.answer({str(row): prompt(row, length) for row, length in enumerate(held.lengths)}, 4)
    finally:
        sys.setprofile(None)
    return {"called": sorted(called)}


def prompt(row: int, length: int) -> list[int]:
    return [3 + i if i < SHARED else 3 + (row + length + 7 * i) % 100 for i in range(length)]


if __name__ == "__main__":
    telling.result(warm_answers.given_by_each_tree("falcon_h1", SERVER, call, without=False))
