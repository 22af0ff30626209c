# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import convolution, metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, walks
from sglang_bcg_fixes.kernels.mamba2_extend import triton as implementation
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from tests.kernels import mamba2_extend_cases as cases
from tests.kernels.linear_extend_mutants import AROUND, CHUNK, Table

SHAPE = Shape(heads=4, groups=2, head=16, states=16, width=4)


# few programs, so that each has several items of work, and blocks of heads of which one is not whole; a sequence alone
# is walked as few
def tuning(part: int, **others: Any) -> implementation.Tuning:
    few, many = Walk(4, 4, 1, part), Walk(2, 4, 1, part)
    return implementation.Tuning(many, (few,), prepare_programs=3, relate_programs=3, strip=4, **others)


TUNING, IN_PARTS, RELATED = tuning(64), tuning(16), tuning(64, relates=True)
TUNINGS = {"": TUNING, "in parts": IN_PARTS, "related": RELATED}
EXACT = 0.001


def step(lengths: list[int], **options: Any) -> cases.Step:
    return cases.draw(SHAPE, lengths, **{"dtype": torch.float16, **options})


STEPS: dict[str, Callable[[], cases.Step]] = {
    "mixed": functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0]),
    "two": functools.partial(step, [20, 3]),
    "long": functools.partial(step, [40]),
    "longer": functools.partial(step, [70]),
    "long steps": functools.partial(step, [20], gates="long steps"),
    "tracked": functools.partial(step, [20, 16, 16], tracked={0: 19, 1: 16}),
    "far below": functools.partial(step, [20], gates="far below"),
    "bounded": lambda: cases.draw(Shape(4, 1, 16, 16, 4, least_step=0.1, most_step=0.3), [20], dtype=torch.float16),
    "wide": lambda: cases.draw(Shape(2, 2, 32, 16, 4), [20], dtype=torch.float16),
    "states of 32": lambda: cases.draw(Shape(1, 1, 16, 32, 4), [20], dtype=torch.float16),
}
PARTS = {"tables": metadata, "convolution": convolution, "walks": walks}
# which of the steps has to notice, and what is written instead of what
MUTANTS = {
    "bends where it is straight": ("long steps", "tl.where(x > SOFTPLUS_LINEAR, x, exact)", "exact"),
    "takes logarithms of one": ("long", "tl.log(sum)", "tl.log(sum + 1)"),
    "forgets the bias of steps": ("long", "+ tl.load(dt_bias + head, mask", "+ 0 * tl.load(dt_bias + head, mask"),
    "forgets the least step": ("bounded", "tl.maximum(_softplus(step), least_step", "tl.maximum(_softplus(step), 0.0"),
    "forgets the most step": ("bounded", "tl.minimum(step, most_step", "tl.minimum(step, 1e9"),
    "counts steps past the end": (
        "long",
        "step = tl.where(real, tl.minimum",
        "step = tl.where(real | True, tl.minimum",
    ),
    "lets gates run away": (
        "far below",
        "gate = tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)",
        "gate = gate * 1e37",
    ),
    "stores gates of heads that are not": ("longer", "(head < HEADS)[None, :]", "(head < 99)[None, :]"),
    "leaves the tail": ("mixed", "gate_items + channel_items + tail_items", "gate_items + channel_items"),
    "writes where there is no slot": ("mixed", "slot = tl.full([], -1, tl.int64)", "slot = tl.full([], 0, tl.int64)"),
    "keeps rows without a slot": ("mixed", "elif tile < TILES_OF_X:", "elif tile < 0:"),
    "mixes B and C up": ("long", "block = past_x // STATES", "block = 3 - past_x // STATES"),
    "takes one tile for another": ("states of 32", "past_x % STATES + ", "0 * past_x + "),
    "takes one group for another": ("long", "group = head // OF_GROUP", "group = head % GROUPS"),
    "takes one head's gates for all": ("long", "(chunk * HEADS + head) * (2 * CHUNK)", "(chunk * HEADS) * (2 * CHUNK)"),
    "reads a state without a prefix": ("mixed", "mask=has_prefix & (start < end)", "mask=start < end"),
    "forgets the state": (
        "long",
        "S = tl.load(of_state, mask=has_prefix &",
        "S = tl.load(of_state, mask=(start < 0) &",
    ),
    "leaves the state as it was": ("long", "        if start < end:\n", "        if start > end:\n"),
    "forgets to forget": ("long", "acc=S * tl.exp2(last)", "acc=S"),
    "forgets decays in the output": ("long", "tl.trans(c)) * tl.exp2(gate)[None, :]", "tl.trans(c))"),
    "sees what is to come": ("long", "in_chunk[:, None] <= in_chunk[None, :]", "in_chunk[:, None] < 99"),
    "does not see itself": ("long", "in_chunk[:, None] <= in_chunk[None, :]", "in_chunk[:, None] < in_chunk[None, :]"),
    "forgets steps in a chunk": ("long", "(decay * step[:, None])", "decay"),
    "forgets steps in the state": (
        "long",
        "propagate_nan=tl.PropagateNan.ALL)) * step\n",
        "propagate_nan=tl.PropagateNan.ALL))\n",
    ),
    "forgets D": ("long", "found += wide * through", "pass"),
    "takes one D for all": ("long", "through = tl.load(D + head)", "through = tl.load(D)"),
    "takes the next chunk's gates": ("long", "(first_row - start) // CHUNK", "(first_row - start) // CHUNK + 1"),
    "reads a neighbour past the end": ("mixed", "taken = tl.minimum(rows, end - 1)", "taken = rows"),
    "leaves no checkpoint": ("tracked", "if TRACK and (piece == 0)", "if TRACK and (piece == 2)"),
    "leaves the checkpoint at the end": ("tracked", "if TRACK and (piece == 0)", "if TRACK and (piece == 1)"),
    "leaves the checkpoint in the slot": ("tracked", "(track_slot - slot) * state_slot", "0 * state_slot"),
    "walks: walks one sequence twice": ("long", "(held >= least_sequences)", "(held >= 0)"),
    "walks: walks many sequences twice": ("mixed", "(held <= most_sequences)", "(held <= 99)"),
    "walks: leaves two sequences": ("two", "least = most + 1\n", "least = most + 2\n"),
    "walks: leaves one sequence": ("long", "    least = 1\n", "    least = 2\n"),
    "relates the first group": (
        "long, related",
        "(group * capacity + taken).to(tl.int64)[:, None] * CHUNK",
        "taken[:, None] * CHUNK",
    ),
    "relates B with itself": ("long, related", "tl.dot(b, tl.trans(c)), mask", "tl.dot(b, tl.trans(b)), mask"),
    "relates one chunk too few": (
        "long, related",
        "real_chunks * GROUPS, tl.num",
        "(real_chunks - 1) * GROUPS, tl.num",
    ),
    "takes one part for another": ("wide, in parts", "(item % PARTS) * PART", "0 * PART"),
    "convolution: reads a window without a prefix": ("mixed", "mask=exists & has_window", "mask=exists"),
    "convolution: forgets the bias": ("long", "mixed += tl.load(bias + channels).to(tl.float32)[None, :]", "pass"),
    "tables: has a prefix always": ("mixed", "tl.where(own & (prefix > 0)[None, :], 1, 0)", "tl.where(own, 1, 0)"),
    "tables: takes the wrong first chunk": (
        "mixed",
        "tl.where(own, chunk_start[None, :], 0)",
        "tl.where(own, number[None, :], 0)",
    ),
}


def faults(case: str, modules: tuple[Any, Any]) -> list[str]:
    name, _, how = case.partition(", ")
    drawn = STEPS[name]()
    return cases.faults(drawn, cases.Launched(drawn, TUNINGS[how], AROUND, CHUNK, modules).run(), CHUNK, EXACT)


if __name__ == "__main__":
    Table(implementation, PARTS, MUTANTS, faults).tell()
