# SPDX-License-Identifier: Apache-2.0
"""Launch a kernel that walks along sequences, without knowing how many a step has.

A graph is captured before that is known, so the kernel is launched several times, each with another `Walk`, and all
but one of the launches end at once. In those for few sequences every item has a multiprocessor, and its shared memory,
to itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.mamba2_extend import Shape

# fewer multiprocessors than these also work: their programs then take turns
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Walk:
    """Parameters of one launch: no bit of a result depends on them. An item has `part` rows of a head's state."""

    programs: int
    warps: int
    stages: int
    part: int

    def part_of(self, shape: Shape) -> int:
        """Return the largest power of two that divides a head, up to `part`."""
        return min(self.part, shape.head & -shape.head)

    def most_sequences(self, shape: Shape) -> int:
        """Return up to how many sequences have no more items than there are programs."""
        return self.programs // (shape.heads * (shape.head // self.part_of(shape)))


def of_few_sequences(walks: Iterable[Walk], shape: Shape) -> tuple[Walk, ...]:
    """Choose from ever larger parts the finest walk that takes one sequence, and the one that takes the most."""
    found = [walk for walk in walks if walk.most_sequences(shape)]
    takes_more = [walk for walk in found[-1:] if walk.most_sequences(shape) > found[0].most_sequences(shape)]
    return (*found[:1], *takes_more)


def launches(few: Sequence[Walk], many: Walk, shape: Shape, max_sequences: int) -> Iterator[tuple[Walk, int, int]]:
    """Yield each walk with the least and the most sequences for which it does the work."""
    least = 1
    for walk in few:
        most = walk.most_sequences(shape)
        yield walk, least, most
        least = most + 1
    if least <= max_sequences:
        yield many, least, max_sequences


@triton.jit
def walked(counts, least_sequences, most_sequences):
    """Return how many sequences this launch walks along: all of the step, or none."""
    held = tl.load(counts + 2)
    return tl.where((held >= least_sequences) & (held <= most_sequences), held, 0)
