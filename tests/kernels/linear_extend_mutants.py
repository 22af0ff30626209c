# SPDX-License-Identifier: Apache-2.0
"""Tables of wrong kernels of a linear layer: how small the steps are that notice, and how each is tried."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_fixes.kernels.linear_extend import metadata
from tests.kernels import mutants
from tests.kernels.linear_extend_cases import Surroundings

CHUNK = 16
AROUND = Surroundings(padding=5, more_tokens=9, max_sequences=8, columns_between=3)

# of implementations that are built on the delta rule, whose cases have these names:
# "mixed", "long" in chunks of 64 or not, ...
OF_DELTA_RULE = {
    "convolution: reads a window without a prefix": ("mixed", "mask=exists & has_window", "mask=exists"),
    "convolution: takes the window's old end": ("mixed", "moved = WIDTH - 1 + position - start", "moved = past"),
    "convolution: forgets the bias": ("biased", "mixed += tl.load(bias + channels).to(tl.float32)[None, :]", "pass"),
    "delta rule: lets gates run away": (
        "far below",
        "return tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)",
        "return gate * 1e37",
    ),
    "delta rule: stops the substitution early": ("long", "tl.static_range(row):", "tl.static_range(min(row, 3)):"),
    "merges half of the blocks": ("long, 64", "if BLOCKS >= 4:", "if BLOCKS >= 8:"),
    "delta rule: merges with the wrong sign": ("long, 64", "return inverse - tl.dot", "return inverse + tl.dot"),
    "takes a long chunk for a short one": ("long, 64", "end - first_row > BLOCK", "end - first_row > 40"),
    "delta rule: writes where there is no slot": (
        "mixed",
        "slot = tl.full([], -1, tl.int64)",
        "slot = tl.full([], 0, tl.int64)",
    ),
    "leaves no checkpoint": ("tracked", "if TRACK and (piece == 0)", "if TRACK and (piece == 2)"),
    "leaves the checkpoint at the end": ("tracked", "if TRACK and (piece == 0)", "if TRACK and (piece == 1)"),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Mistakes in an implementation, or in a part of it whose name stands before a mistake's.

    Each has the case that has to notice, and what is written instead of what. `faults` runs a case on modules.
    """

    implementation: Any
    parts: Mapping[str, Any]
    mistakes: Mapping[str, tuple[str, str, str]]
    faults: Callable[[str, tuple[Any, Any]], list[str]]

    def noticed(self, name: str, folder: pathlib.Path) -> bool:
        case, old, new = self.mistakes[name]
        part = self.parts.get(name.partition(": ")[0], self.implementation)
        module = mutants.changed(part, old, new, folder)
        if part is metadata:
            return mutants.is_noticed(lambda: self.faults(case, (self.implementation, module)))
        if part is not self.implementation:
            module = mutants.on(module, part, self.implementation, folder)
        return mutants.is_noticed(lambda: self.faults(case, (module, metadata)))

    def tell(self) -> None:
        """Tell of those that the command line names."""
        from cpu_sglang import interpreter

        interpreter.install(overflow_is_an_error=True)
        print("ready", flush=True)
        mutants.tell(sys.argv[1:], self.noticed)
