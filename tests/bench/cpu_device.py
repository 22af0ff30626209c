"""A device for the layer bench where there is no GPU: what is captured is simply done again."""

from __future__ import annotations

import time
from collections.abc import Callable


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
