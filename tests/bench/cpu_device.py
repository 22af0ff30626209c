# SPDX-License-Identifier: Apache-2.0
"""A device for benches without a GPU: a replay does the captured work again, and each arm is measured once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from benchmarks.bench import timing


def once(arms: Mapping[str, Callable[[], timing.Sample]], _: int) -> dict[str, list[timing.Sample]]:
    """Stand in for `timing.in_turn` where nobody looks at the times and a call takes a second."""
    return {name: [arm()] for name, arm in arms.items()}


class Cpu:
    name = "cpu"

    def synchronize(self) -> None: ...

    def flush(self) -> None: ...

    def release(self) -> None: ...

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
