# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape
from sglang_bcg_fixes.kernels.gdn_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import convolution, delta_rule, metadata
from tests.kernels import gdn_extend_cases as cases
from tests.kernels.linear_extend_mutants import AROUND, CHUNK, OF_DELTA_RULE, Table

SHAPE = Shape(key_heads=1, value_heads=2, keys=16, values=16, width=4)
# few programs, so that each has several items of work
TUNING = implementation.Tuning(prepare_programs=3, advance_programs=2, strip=4)
IN_SPANS = cases.Surroundings(padding=21, max_sequences=8, span=16)
EXACT = 0.001


def step(lengths: list[int], **options: Any) -> cases.Step:
    return cases.draw(SHAPE, lengths, **{"dtype": torch.float16, **options})


STEPS = {
    "mixed": functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0]),
    "long": functools.partial(step, [40]),
    "tracked": functools.partial(step, [20, 16, 16], tracked={0: 19, 1: 16}),
    "biased": functools.partial(step, [17], bias=True),
    "far below": functools.partial(step, [20], gates="far below"),
}
# what is wrong elsewhere than in the implementation itself
PARTS = {"tables": metadata, "convolution": convolution, "delta rule": delta_rule}
# which of them has to notice, or in which chunks or spans; and what is written instead of what
MUTANTS = {
    **OF_DELTA_RULE,
    "convolution: forgets the window": ("mixed", "mask=earlier, other=0.0)", "mask=earlier & (row < 0), other=0.0)"),
    "convolution: looks at others": ("mixed", "(row >= start + (WIDTH - 1 - number))", "(row >= WIDTH - 1 - number)"),
    "convolution: leaves the window as it was": ("mixed", "tl.store(own + in_slot, after, mask=exists)", "pass"),
    "convolution: takes one input for another": ("long", "wide[number + tap]", "wide[number + tap - 1]"),
    "keeps lengths of the keys": ("long", "length = tl.sqrt(", "length = 1 + 0 * tl.sqrt("),
    "mixes rows up": ("long", "tl.permute(joined, (0, 3, 2, 1))", "tl.permute(joined, (0, 2, 3, 1))"),
    "divides by what is later": (
        "far below",
        'tl.where(not_earlier, gate[:, None] - gate[None, :], -float("inf"))',
        "gate[:, None] - gate[None, :]",
    ),
    "forgets the gain of columns": (
        "long",
        "inverse *= tl.load(own_gains + member * CHUNK + in_chunk)[None, :]",
        "pass",
    ),
    "leaves the tail": ("mixed", "(real_chunks + tail_chunks) * VALUE_HEADS", "real_chunks * VALUE_HEADS"),
    "counts chunks past the end": ("mixed", "tl.where(real, to_end, 0.0)", "to_end"),
    "forgets to forget": ("long", "acc=S * whole", "acc=S"),
    "leaves the state as it was": ("long", "tl.store(of_state, S.to(state.dtype.element_ty), mask=is_here)", "pass"),
    "adds instead of correcting": ("long", "-tl.exp2(gate)", "tl.exp2(gate)"),
    "forgets decays in the output": ("long", "known_before * minus_before[None, :]", "-known_before"),
    "takes the next chunk's decays": ("long", "tl.where(first_row > first, VALUE_HEADS * (3 * CHUNK), 0)", "0"),
    "forgets the last chunk's output": ("long", "if last_row > first:", "if last_row > first + 99:"),
    "convolution: leaves no window with the checkpoint": (
        "tracked",
        "tl.store(conv + track_slot * conv_slot + in_slot, at_checkpoint, mask=exists)",
        "pass",
    ),
    "begins each span anew": ("long, in spans", "begin = start + tl.cdiv(", "begin = start + 0 * tl.cdiv("),
    "ends with a span": ("long, in spans", "stop = tl.minimum(", "stop = tl.minimum(first_token + 9, "),
    "loses chunks between spans": ("long, in spans", "chunks += first_chunk * FIELDS", "chunks += span * FIELDS * 0"),
    "leaves every span's tail": (
        "mixed, in spans",
        "tail = tl.maximum(tl.load(counts + 1), first_token)",
        "tail = tl.maximum(last_token, first_token)",
    ),
    "tables: forgets the rest of a chunk": ("mixed", "tl.cdiv(length, CHUNK)", "(length // CHUNK)"),
    "tables: takes slots for sequences": (
        "mixed",
        "tl.where(of_row, slot[None, :], 0)",
        "tl.where(of_row, number[None, :], 0)",
    ),
    "tables: has a window always": ("mixed", "of_row & (prefix > 0)[None, :]", "of_row"),
    "tables: advances what has no slot": ("mixed", "work = tl.where(slot >= 0, length, 0)", "work = length"),
    "tables: counts a tie twice": ("tracked", "(number[None, :] < row[:, None])", "(number[None, :] > 99)"),
    "tables: counts tokens of some": (
        "mixed",
        "tl.store(counts + 1, tl.sum(length, 0))",
        "tl.store(counts + 1, tl.max(length, 0))",
    ),
    "tables: forgets the checkpoint's unit": ("tracked", "// track_unit * track_unit", ""),
    "tables: counts chunks that end before a span": (
        "long, in spans",
        "bound[:, None] * span - start[None, :]",
        "bound[:, None] * span - end[None, :]",
    ),
}


def faults(case: str, modules: tuple[Any, Any]) -> list[str]:
    name, _, how = case.partition(", ")
    drawn = STEPS[name]()
    chunk, around = 64 if how == "64" else CHUNK, IN_SPANS if how == "in spans" else AROUND
    return cases.faults(drawn, cases.Launched(drawn, TUNING, around, chunk, modules).run(), chunk, EXACT)


if __name__ == "__main__":
    Table(implementation, PARTS, MUTANTS, faults).tell()
