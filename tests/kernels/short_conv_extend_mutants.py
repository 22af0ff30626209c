# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import convolution, metadata
from sglang_bcg_fixes.kernels.short_conv_extend import Shape
from sglang_bcg_fixes.kernels.short_conv_extend import triton as implementation
from tests.kernels import short_conv_extend_cases as cases
from tests.kernels.linear_extend_cases import faults as faults_of
from tests.kernels.linear_extend_mutants import AROUND, CHUNK, Table

# the published width; three tiles
SHAPE = Shape(channels=48, width=3)
# few programs, so that each has several items of work
TUNING = implementation.Tuning(programs=3, strip=4, tile=16)
EXACT = 0.0005


def step(lengths: list[int], **options: Any) -> cases.Step:
    return cases.draw(SHAPE, lengths, **{"dtype": torch.float16, **options})


STEPS: dict[str, Callable[[], cases.Step]] = {
    "mixed": functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0]),
    "long": functools.partial(step, [40, 3]),
    "short": functools.partial(step, [1, 1, 2], fresh=[1]),
    "with bias": functools.partial(step, [20], bias=True),
}
PARTS = {"tables": metadata, "convolution": convolution}
# which of the steps has to notice, and what is written instead of what
MUTANTS = {
    "leaves the tail": ("mixed", "(real_chunks + behind) * TILES", "real_chunks * TILES"),
    "writes where there is no slot": ("mixed", "if slot >= 0:", "if slot >= -1:"),
    "keeps rows without a slot": ("mixed", "\n        else:\n", "\n        elif slot > 0:\n"),
    "takes the tail for a chunk": ("mixed", "        if is_real:\n", "        if chunk >= 0:\n"),
    "takes the first chunk for all": ("long", "tl.where(is_real, chunk, 0) * FIELDS", "0 * FIELDS"),
    "takes the first tile for all": ("long", "(item % TILES) * TILE", "0 * TILE"),
    "never turns a window": ("long", "if first_row == start:", "if first_row < start:"),
    "writes past the end": ("mixed", "mask=row < end - number)\n            #", "mask=row < 99)\n            #"),
    "writes past the output": ("mixed", "end = rows_of_output\n", "end = rows_of_output + 9\n"),
    "stores one row for all": ("long", "sums[number].to(", "sums[0].to("),
    "forgets the bias": ("with bias", "HAS_BIAS=bias is not None", "HAS_BIAS=False"),
    "convolution: reads a window without a prefix": ("mixed", "mask=exists & has_window", "mask=exists"),
    "convolution: forgets the earlier window": ("short", "exists & ~is_new & has_window", "exists & ~is_new & ~exists"),
    "convolution: forgets a tap": ("long", "range(1, WIDTH)", "range(1, WIDTH - 1)"),
    "convolution: turns taps round": ("long", "channels * WIDTH + tap)", "channels * WIDTH + WIDTH - 1 - tap)"),
    "convolution: keeps the old window": ("long", "tl.store(own + in_slot, after", "tl.store(own + in_slot, window"),
    "convolution: activates": (
        "long",
        "        outputs += (mixed,)",
        "        outputs += (libdevice.fast_dividef(mixed, 1.0 + tl.exp2(-LOG2_E * mixed)),)",
    ),
    "tables: has a prefix always": (
        "mixed",
        "(prefix > 0)[None, :], 1, 0), 1), mask=is_chunk",
        "here[None, :], 1, 0), 1), mask=is_chunk",
    ),
    "tables: takes the wrong slot": (
        "long",
        "slot[None, :], 0), 1), mask=is_chunk",
        "slot[None, :] + 1, 0), 1), mask=is_chunk",
    ),
}


def faults(case: str, modules: tuple[Any, Any]) -> list[str]:
    return faults_of(
        (drawn := STEPS[case]()), cases.Launched(drawn, TUNING, AROUND, CHUNK, modules).run(), CHUNK, EXACT
    )


if __name__ == "__main__":
    Table(implementation, PARTS, MUTANTS, faults).tell()
