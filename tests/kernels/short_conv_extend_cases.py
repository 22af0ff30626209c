# SPDX-License-Identifier: Apache-2.0
"""Steps of a short convolution that every implementation must get right, with NaN in all memory that it must not use.

The tests run them small, on Triton's interpreter; a GPU runs the same ones at a model's sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.short_conv_extend import Shape
from sglang_bcg_fixes.kernels.short_conv_extend import triton as implementation
from tests.kernels import accuracy, linear_extend_cases, short_conv_reference
from tests.kernels.linear_extend_cases import NAN, requests, slots_of


@dataclasses.dataclass(frozen=True)
class Step(linear_extend_cases.Step):
    """The first gate's output of every token, and the layer's weights; there are no states."""

    inputs: Any
    conv_weights: Any
    bias: Any

    of_tokens = ("inputs",)
    of_layer = ("conv_weights", "bias")

    @property
    def output_sizes(self) -> tuple[int, ...]:
        return (self.shape.channels,)

    def recurrent(self, kind: Any) -> accuracy.Results:
        given = short_conv_reference.Inputs(self.lengths, self.inputs, self.conv_weights, self.conv, self.bias)
        return accuracy.Results(*short_conv_reference.convolved(given, kind), self.state)


def draw(
    shape: Shape,
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    dtype: Any = torch.bfloat16,
    of_weights: Any = None,
    fresh: Sequence[int] = (),
    gone: Sequence[int] = (),
    bias: bool = False,
    seed: int = 0,
) -> Step:
    """Draw a step; `requests` says what `fresh` and `gone` are. Published layers have no bias."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    who = requests(lengths, fresh, gone, None, seed)
    conv = torch.full((slots_of(lengths), shape.channels, shape.width - 1), NAN, dtype=dtype, device=device)
    for number, slot in enumerate(who["slots"]):
        if number not in gone and number not in fresh:
            conv[slot] = normal(*conv.shape[1:])
    return Step(
        shape=shape,
        **who,
        inputs=normal(sum(lengths), shape.channels),
        conv_weights=normal(shape.channels, shape.width, kind=of_weights or dtype),
        bias=normal(shape.channels) if bias else None,
        conv=conv,
        state=torch.zeros(len(conv), 1, 1, 1, device=device),
    )


class Launched(linear_extend_cases.Launched):
    """A step on the Triton implementation, or another one."""

    modules = implementation, metadata

    def extend(self) -> None:
        step = self.step
        self.implementation.extend(
            *self.inputs,
            shape=step.shape,
            **step.weights,
            conv=self.conv,
            tables=self.tables,
            scratch=self.scratch,
            output=self.output,
            tuning=self.tuning,
        )
