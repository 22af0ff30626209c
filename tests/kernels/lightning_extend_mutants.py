# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata, walks
from sglang_bcg_fixes.kernels.linear_extend.walks import Walk
from tests.kernels import lightning_extend_cases as cases
from tests.kernels import linear_extend_cases, mutants

SHAPE = Shape(heads=3, head=32)
# few programs, so that each has several items of work, and heads in two parts; a sequence alone is walked as few
TUNING = form.Tuning(Walk(2, 4, 1, part=16), (Walk(6, 4, 1, part=16),), relate_programs=2, clearing_programs=2)
CHUNK = 16
AROUND = linear_extend_cases.Surroundings(padding=5, more_tokens=9, max_sequences=8, columns_between=3)
EXACT = 0.00001
# of an output in bfloat16 that is rounded once
ROUNDED = 0.00175


def step(lengths: list[int], **options: Any) -> cases.Step:
    return cases.draw(SHAPE, lengths, **options)


STEPS: dict[str, Callable[[], cases.Step]] = {
    "mixed": functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0]),
    "long": functools.partial(step, [40]),
    "two": functools.partial(step, [20, 3]),
    "tracked": functools.partial(step, [20, 16, 16], tracked={0: 19, 1: 16}),
    "at once": functools.partial(step, [40], decays="at once"),
    "halves": functools.partial(step, [80], dtype=torch.bfloat16),
}
# which of the steps has to notice, and what is written instead of what
MUTANTS = {
    "sees the future": ("long", "tl.where(gap >= 0, -rate * gap", "tl.where(gap >= -99, -rate * gap"),
    "does not see itself": ("long", "tl.where(gap >= 0,", "tl.where(gap > 0,"),
    "forgets nothing within a chunk": ("long", "tl.where(gap >= 0, -rate * gap", "tl.where(gap >= 0, 0.0 * gap"),
    "decays a token late": ("long", "tl.exp2(-rate * (in_chunk + 1))", "tl.exp2(-rate * in_chunk)"),
    "decays a chunk as if it were whole": ("long", "S * tl.exp2(-rate * count)", "S * tl.exp2(-rate * CHUNK)"),
    "decays behind the end": ("at once", "tl.maximum(count - 1 - in_chunk, 0)", "(count - 1 - in_chunk)"),
    "ends a chunk late": ("long", "tl.maximum(count - 1 - in_chunk, 0)", "tl.maximum(count - in_chunk, 0)"),
    "takes one head's decay": ("long", "tl.load(decay + head)", "tl.load(decay)"),
    "takes powers of two": ("long", "tl.load(decay + head) * LOG2_E", "tl.load(decay + head)"),
    "scales the past alone": (
        "long",
        "(found + tl.dot(values.to(tl.float32), high)) * scale",
        "found * scale + tl.dot(values.to(tl.float32), high)",
    ),
    "mixes keys and queries up": ("long", "tl.dot(keys, tl.trans(queries))", "tl.dot(queries, tl.trans(keys))"),
    "forgets low halves of states": ("halves", "tl.dot(low, given, acc=tl.dot(high, given))", "tl.dot(high, given)"),
    "forgets low halves of a chunk": (
        "halves",
        "tl.dot(values, low, acc=tl.dot(values, high))",
        "tl.dot(values, high)",
    ),
    "takes high halves for low ones": (
        "halves",
        "of_near + rows_of_output.to(tl.int64) * (HEADS * CHUNK), mask",
        "of_near, mask",
    ),
    "relates the first head": ("long", "(head * rows_of_output + rows)", "rows"),
    "relates one chunk too few": ("long", "real_chunks * HEADS, tl.num", "(real_chunks - 1) * HEADS, tl.num"),
    "walks: walks one sequence twice": ("long", "(held >= least_sequences)", "(held >= 0)"),
    "walks: walks many sequences twice": ("two", "(held <= most_sequences)", "(held <= 99)"),
    "takes the first values": ("long", "(item % PARTS) * PART + tl.arange", "tl.arange"),
    "reads behind the end": ("mixed", "is_real = (rows < end)[:, None]", "is_real = (rows < rows_of_output)[:, None]"),
    "reads fresh states": ("mixed", "mask=has_prefix & (start < end)", "mask=start < end"),
    "forgets prefixes": ("long", "mask=has_prefix & (start < end)", "mask=has_prefix & (start > end)"),
    "never stores the state": (
        "long",
        "        if start < end:\n            tl.store(of_state, S",
        "        if start > end:\n            tl.store(of_state, S",
    ),
    "checkpoints the end": ("tracked", "(piece == 0) & (track_slot >= 0)", "(piece == 1) & (track_slot >= 0)"),
    "checkpoints without a slot": ("tracked", "(piece == 0) & (track_slot >= 0)", "(piece == 0)"),
    "begins again behind a checkpoint": ("tracked", "tl.where(piece == 0, start, middle)", "start"),
    "leaves the tail": ("mixed", "(real_chunks + behind) * TILES", "real_chunks * TILES"),
    "leaves rows of nobody": ("mixed", "(tl.load(of_chunk + 3) < 0) |", "(tl.load(of_chunk + 3) < -9) |"),
    "clears rows of somebody": ("mixed", "(tl.load(of_chunk + 3) < 0) |", "(tl.load(of_chunk + 3) < 99) |"),
    "clears the first columns": ("mixed", "((item % TILES) * TILE + tl.arange", "(tl.arange"),
    "clears one chunk too few": (
        "long",
        "tail + (chunk - real_chunks) * CHUNK",
        "tail + (chunk - real_chunks + 1) * CHUNK",
    ),
}


def faults(case: str, modules: tuple[Any, Any]) -> list[str]:
    drawn = STEPS[case]()
    launched = cases.Launched(drawn, TUNING, AROUND, CHUNK, modules)
    is_half = drawn.q.dtype is torch.bfloat16
    return linear_extend_cases.faults(drawn, launched.run(), CHUNK, ROUNDED if is_half else EXACT)


def noticed(name: str, folder: pathlib.Path) -> bool:
    case, old, new = MUTANTS[name]
    is_of_walks = name.startswith("walks: ")
    module = mutants.changed(walks if is_of_walks else form, old, new, folder)
    if is_of_walks:
        module = mutants.on(module, walks, form, folder)
    return mutants.is_noticed(lambda: faults(case, (module, metadata)))


if __name__ == "__main__":
    from cpu_sglang import interpreter

    interpreter.install(overflow_is_an_error=True)
    print("ready", flush=True)
    mutants.tell(sys.argv[1:], noticed)
