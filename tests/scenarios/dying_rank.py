# SPDX-License-Identifier: Apache-2.0
"""Two ranks that check themselves at start; the second one dies in the middle, and the first finds its graphs right."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.scenarios import named


def checked(number: str, meeting: str, how: str = "dies") -> None:
    rank = int(number)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = types.SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    # what a rank asks SGLang for
    parallel_state: Any = types.ModuleType("sglang.srt.distributed.parallel_state")
    parallel_state.get_tp_group = lambda: group
    names = ("sglang", "sglang.srt", "sglang.srt.distributed")
    packages: list[Any] = [types.ModuleType(name) for name in names]
    packages[-1].parallel_state = parallel_state
    sys.modules |= {package.__name__: package for package in packages}
    from sglang_bcg_fixes.process.selfcheck import at_start

    class Check:
        def __init__(self, model_runner: Any, any_rank: Callable[[bool], bool]) -> None:
            if how == "cannot begin" and rank == 1:
                raise LookupError("nothing runs one batch")
            self.any_rank = any_rank

        def run(self) -> Iterator[None]:
            assert self.any_rank(rank == 1) and not self.any_rank(False)
            if rank == 1:
                os._exit(3)
            self.any_rank(False)
            raise AssertionError("the other rank is dead")
            yield

    vars(at_start)["Check"] = Check
    print(at_start.look(types.SimpleNamespace(device="cpu")).line())


if __name__ == "__main__":
    named.run(globals())
