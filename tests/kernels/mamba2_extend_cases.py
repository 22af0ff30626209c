# SPDX-License-Identifier: Apache-2.0
"""Steps of Mamba2 that every implementation must get right, with NaN in all memory that it must not use.

The tests run them small, on Triton's interpreter; a GPU runs the same ones at a model's sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape
from sglang_bcg_fixes.kernels.mamba2_extend import triton as implementation
from tests.kernels import accuracy, linear_extend_cases, mamba2_reference
from tests.kernels.linear_extend_cases import (
    NAN,
    After,
    Surroundings,
    differences,
    faults,
    requests,
    same_bits,
    slots_of,
    wanted,
)

__all__ = ["After", "Launched", "Step", "Surroundings", "differences", "draw", "faults", "same_bits", "wanted"]

# the logarithm of -A from head to head, and what step sizes are shifted by: heads that forget slowly and heads that
# forget at once; hardly at all; all at once; in steps that are as long as their input
GATES = {
    "mixed": (0.0, 2.7, -2.0),
    "near 0": (-9.0, -6.0, -4.0),
    "far below": (3.0, 6.0, 8.0),
    "long steps": (-6.0, -5.0, 24.0),
}


@dataclasses.dataclass(frozen=True)
class Step(linear_extend_cases.Step):
    """x, B and C of every token before the convolution, its step sizes, and the layer's weights."""

    inputs: Any
    dt: Any
    conv_weights: Any
    bias: Any
    A: Any
    D: Any
    dt_bias: Any

    of_tokens = ("inputs", "dt")
    of_layer = ("conv_weights", "bias", "A", "D", "dt_bias")

    @property
    def output_sizes(self) -> tuple[int, int]:
        return self.shape.heads, self.shape.head

    def recurrent(self, kind: Any) -> accuracy.Results:
        given = mamba2_reference.Inputs(
            self.lengths, self.shape, self.inputs, self.dt, conv=self.conv, state=self.state, **self.weights
        )
        return mamba2_reference.recurrent(given, kind)


def draw(
    shape: Shape,
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    dtype: Any = torch.bfloat16,
    kept: Any = torch.float32,
    of_weights: Any = torch.float32,
    gates: str = "mixed",
    fresh: Sequence[int] = (),
    gone: Sequence[int] = (),
    tracked: dict[int, int] | None = None,
    bias: bool = True,
    seed: int = 0,
) -> Step:
    """Draw a step; `requests` says what `fresh`, `gone` and `tracked` are, `kept` is the dtype of states."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    tokens = sum(lengths)
    who = requests(lengths, fresh, gone, tracked, seed)
    sizes = (slots_of(lengths), shape.heads, shape.head, shape.states)
    conv = torch.full((slots_of(lengths), shape.channels, shape.width - 1), NAN, dtype=dtype, device=device)
    state = torch.full(sizes, NAN, dtype=kept, device=device)
    for number, slot in enumerate(who["slots"]):
        if number not in gone and number not in fresh:
            state[slot], conv[slot] = normal(*sizes[1:], kind=kept), normal(*conv.shape[1:])
    least, most, offset = GATES[gates]
    return Step(
        shape=shape,
        **who,
        inputs=normal(tokens, shape.channels),
        dt=normal(tokens, shape.heads) + offset,
        conv_weights=normal(shape.channels, shape.width) * 0.5,
        bias=normal(shape.channels) if bias else None,
        A=-torch.linspace(least, most, shape.heads, device=device).exp(),
        D=normal(shape.heads, kind=of_weights),
        dt_bias=normal(shape.heads, kind=of_weights) * 0.5,
        conv=conv,
        state=state,
    )


class Launched(linear_extend_cases.Launched):
    """A step on the Triton implementation, or another one."""

    modules = implementation, metadata
