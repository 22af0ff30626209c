# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels, each by one line, and whether the cases notice; run with the names of some of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_fixes.kernels.kda_extend import Shape
from sglang_bcg_fixes.kernels.kda_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import convolution, delta_rule, metadata
from tests.kernels import kda_extend_cases as cases
from tests.kernels.linear_extend_mutants import AROUND, CHUNK, OF_DELTA_RULE, Table

SHAPE = Shape(heads=2, keys=16, values=16, width=4)
SAFE = Shape(heads=2, keys=16, values=16, width=4, lower_bound=-5.0)
# few programs, so that each has several items of work
TUNING = implementation.Tuning(prepare_programs=3, advance_programs=2, strip=4)
EXACT = 0.001


def step(lengths: list[int], shape: Shape = SHAPE, **options: Any) -> cases.Step:
    return cases.draw(shape, lengths, **{"dtype": torch.float16, **options})


STEPS: dict[str, Callable[[], cases.Step]] = {
    "mixed": functools.partial(step, [5, 0, 18, 2], fresh=[2], gone=[0]),
    "long": functools.partial(step, [40]),
    "tracked": functools.partial(step, [20, 16, 16], tracked={0: 19, 1: 16}),
    "biased": functools.partial(step, [17], bias=True),
    "far below": functools.partial(step, [20], gates="far below"),
    "unlike": functools.partial(step, [40], gates="unlike"),
    "safe": functools.partial(step, [20], SAFE),
    "squashed": functools.partial(step, [20], is_squashed=True),
    "wide": functools.partial(step, [20], Shape(heads=1, keys=16, values=32, width=4)),
}
# what is wrong elsewhere than in the implementation itself
PARTS = {"tables": metadata, "convolution": convolution, "delta rule": delta_rule}
# which of them has to notice, or in which chunks or parts; and what is written instead of what
MUTANTS = {
    **OF_DELTA_RULE,
    "keeps lengths": ("long", "return mixed * (scale / tl.sqrt(", "return mixed * (scale + 0 * tl.sqrt("),
    "forgets the bias of gates": ("long", "+= tl.load(dt_bias + of_queries)", "+= 0 * tl.load(dt_bias + of_queries)"),
    "takes one head's rate for all": ("long", "tl.load(A_log + head)", "tl.load(A_log)"),
    "takes one key's gate for all": ("unlike", "a_row + of_queries[None, :]", "a_row + (0 * of_queries)[None, :]"),
    "forgets the lower bound": ("safe", "safe if HAS_LOWER_BOUND", "safe if KEYS < 0"),
    "forgets the rate of a safe gate": ("safe", "tl.sigmoid(rate * gate)", "tl.sigmoid(gate)"),
    "takes raw betas for squashed ones": ("long", "if not IS_SQUASHED:", "if IS_SQUASHED:"),
    "takes squashed betas for raw ones": ("squashed", "if not IS_SQUASHED:", "if KEYS > 0:"),
    "counts gates past the end": ("long", "tl.where(real[:, None], bounded(gate), 0.0)", "bounded(gate)"),
    "takes the first token for the last": ("long", "own_sums + (CHUNK - 1) * KEYS + key", "own_sums + key"),
    "takes the start for every reference": ("long", "token // (2 * half) * (2 * half) + half - 1", "0 * token"),
    "takes an earlier token for the reference": (
        "long",
        "token // (2 * half) * (2 * half) + half - 1",
        "token // (2 * half) * (2 * half) + half - 2",
    ),
    "mixes the halves up": ("long", "token // half % 2 == 1", "token // half % 2 == 0"),
    "leaves the nearest pairs": ("long", "for level in range(LEVELS):", "for level in range(1, LEVELS):"),
    "leaves the farthest pairs": ("long", "for level in range(LEVELS):", "for level in range(LEVELS - 1):"),
    "forgets factors of queries": ("long", "(q * factor)", "q"),
    "does not see itself": ("long", "qk = tl.where(is_same, tl.sum(q * k, 1)[:, None], qk)", "pass"),
    "sees itself decayed": ("long", "tl.sum(q * k, 1)[:, None], qk)", "tl.sum(q * k * decay, 1)[:, None], qk)"),
    "forgets the gain of rows": ("long", "below = kk * gain[:, None]", "below = kk"),
    "forgets the gain of columns": ("long", "inverse *= gain[None, :]", "pass"),
    "reads the sums too early": (
        "long",
        "tl.store(own_sums + in_sums, _running_sums(tl.where(real[:, None], bounded(gate), 0.0)))",
        "pass",
    ),
    "adds instead of correcting": ("long", "(-k * decay)", "(k * decay)"),
    "forgets decays of queries": ("long", "(q * decay)", "q"),
    "forgets decays to the end": ("long", "(k * to_end)", "k"),
    "leaves the tail": ("mixed", "(real_chunks + tail_chunks) * HEADS", "real_chunks * HEADS"),
    "learns past the end": (
        "long",
        "mask=(rows < end)[:, None], other=0.0)\n                T",
        "mask=(rows < 99)[:, None])\n                T",
    ),
    "reads a neighbour past the end": ("mixed", "taken = tl.minimum(rows, end - 1)", "taken = rows"),
    "forgets to forget": ("long", "tl.broadcast_to(whole[None, :], S.shape)", "1.0"),
    "forgets values instead of keys": ("long", "whole[None, :]", "whole[:, None]"),
    "leaves the state as it was": (
        "long",
        "        if start < end:\n            tl.st",
        "        if start > end:\n            tl.st",
    ),
    "takes the next chunk's decays": ("long", "(first_row - start) // CHUNK\n", "(first_row - start) // CHUNK + 1\n"),
    "takes one part for another": ("wide, in parts", "(item % PARTS) * PART", "0 * PART"),
    "leaves the checkpoint in the slot": ("tracked", "(track_slot - slot) * state_slot", "0 * state_slot"),
}


def faults(case: str, modules: tuple[Any, Any]) -> list[str]:
    name, _, how = case.partition(", ")
    drawn = STEPS[name]()
    chunk = 64 if how == "64" else CHUNK
    tuning = (
        implementation.Tuning(prepare_programs=3, advance_programs=2, strip=4, part=16) if how == "in parts" else TUNING
    )
    return cases.faults(drawn, cases.Launched(drawn, tuning, AROUND, chunk, modules).run(), chunk, EXACT)


if __name__ == "__main__":
    Table(implementation, PARTS, MUTANTS, faults).tell()
