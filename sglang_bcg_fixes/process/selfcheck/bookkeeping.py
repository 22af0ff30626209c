# SPDX-License-Identifier: Apache-2.0
"""Save and restore what requests leave in a server's pools: free lists, tables, slot tensors.

SGLang's pools are plain objects that hold numbers, lists and tensors, in every release under other names. So nothing is
named here: whatever an object of `sglang.srt.mem_cache` holds is remembered, but for the big tensors behind the slots.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from typing import Any

MEM_CACHE = "sglang.srt.mem_cache"
# larger ones hold what slots contain, not which are free; those are pools.py's
LARGEST = 64 * 2**20
CONTAINERS = (list, dict, set, collections.deque)


class Bookkeeping:
    """The state of the objects that lead from the roots, as it was when this was made."""

    def __init__(self, *roots: Any) -> None:
        self.objects = list(reachable(roots))
        self.values = [dict(vars(held)) for held in self.objects]
        held = {id(value): value for value in self.held()}
        copies = ((value, copied(value)) for value in held.values())
        self.contents = [(value, content) for value, content in copies if content is not None]

    def held(self) -> Iterator[Any]:
        for values in self.values:
            yield from values.values()

    def restore(self) -> None:
        """Every attribute is the object that it was, with the content that it had."""
        for held, values in zip(self.objects, self.values, strict=True):
            # never without what it had: a pool may have threads
            vars(held).update(values)
            for name in vars(held).keys() - values.keys():
                del vars(held)[name]
        for value, content in self.contents:
            refill(value, content)


def reachable(roots: tuple[Any, ...]) -> Iterator[Any]:
    """The objects of SGLang's pools, each once; what else they lead to belongs to somebody else."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        held = waiting.pop()
        if id(held) in seen or not type(held).__module__.startswith(MEM_CACHE) or not hasattr(held, "__dict__"):
            continue
        seen.add(id(held))
        yield held
        waiting.extend(vars(held).values())


def copied(value: Any) -> Any:
    """The content of what can change in place, or None."""
    import torch

    if isinstance(value, torch.Tensor):
        small = value.numel() * value.element_size() <= LARGEST
        return value.clone() if small else None
    return type(value)(value) if type(value) in CONTAINERS else None


def refill(value: Any, content: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        value.copy_(content)
        return
    value.clear()
    value.extend(content) if isinstance(value, list | collections.deque) else value.update(content)


class Randomness:
    """Python's and torch's generators, as they were when this was made."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        self.python = random.getstate()
        self.host = torch.get_rng_state()
        self.gpu = torch.cuda.get_rng_state() if self.device.type == "cuda" else None

    def restore(self) -> None:
        import torch

        random.setstate(self.python)
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu)
