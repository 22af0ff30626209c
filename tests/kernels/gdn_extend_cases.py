# SPDX-License-Identifier: Apache-2.0
"""Steps of gated delta net that every implementation must get right, with NaN in all memory that it must not use.

The tests run them small, on Triton's interpreter; a GPU runs the same ones at a model's sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape
from sglang_bcg_fixes.kernels.gdn_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import metadata
from tests.kernels import accuracy, gdn_reference, linear_extend_cases
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

# of A_log and dt_bias: heads that forget slowly and heads that forget at once; hardly at all; all at once
GATES = {"mixed": (-4.0, 2.0, 0.0), "near 0": (-12.0, -8.0, 0.0), "far below": (3.0, 6.0, 40.0)}


def after_of_rank(after: After, number: int, ranks: int, whole: Shape) -> After:
    """Extract what one of several ranks has of the results under tensor parallelism."""
    return After(
        of_rank(after.output, 1, number, ranks),
        channels_of_rank(after.conv, 1, whole, number, ranks),
        of_rank(after.state, 1, number, ranks),
    )


def of_rank(tensor: Any, dimension: int, number: int, ranks: int) -> Any:
    return tensor.chunk(ranks, dimension)[number].contiguous()


def channels_of_rank(tensor: Any, dimension: int, whole: Shape, number: int, ranks: int) -> Any:
    """A rank's channels: its queries, its keys and its values, each of them a part of all."""
    of_keys, of_values = whole.key_heads * whole.keys, whole.value_heads * whole.values
    parts = tensor.split([of_keys, of_keys, of_values], dimension)
    return torch.cat([of_rank(each, dimension, number, ranks) for each in parts], dimension)


@dataclasses.dataclass(frozen=True)
class Step(linear_extend_cases.Step):
    """Queries, keys and values of every token before the convolution, its gates, and the layer's weights."""

    mixed_qkv: Any
    a: Any
    b: Any
    conv_weights: Any
    bias: Any
    A_log: Any
    dt_bias: Any

    of_tokens = ("mixed_qkv", "a", "b")
    of_layer = ("conv_weights", "bias", "A_log", "dt_bias")

    @property
    def output_sizes(self) -> tuple[int, int]:
        return self.shape.value_heads, self.shape.values

    def recurrent(self, kind: Any) -> accuracy.Results:
        inputs = gdn_reference.Inputs(
            lengths=self.lengths,
            key_heads=self.shape.key_heads,
            mixed_qkv=self.mixed_qkv,
            a=self.a,
            b=self.b,
            conv=self.conv,
            state=self.state,
            **self.weights,
        )
        return gdn_reference.recurrent(inputs, kind)

    def rank(self, number: int, ranks: int) -> Step:
        """Extract the heads that one of several ranks has under tensor parallelism."""
        whole = self.shape
        shape = dataclasses.replace(whole, key_heads=whole.key_heads // ranks, value_heads=whole.value_heads // ranks)

        def heads(tensor: Any) -> Any:
            return of_rank(tensor, -1, number, ranks)

        def channels(tensor: Any, dimension: int) -> Any:
            return channels_of_rank(tensor, dimension, whole, number, ranks)

        return dataclasses.replace(
            self,
            shape=shape,
            mixed_qkv=channels(self.mixed_qkv, 1),
            a=heads(self.a),
            b=heads(self.b),
            conv_weights=channels(self.conv_weights, 0),
            bias=None if self.bias is None else channels(self.bias, 0),
            A_log=heads(self.A_log),
            dt_bias=heads(self.dt_bias),
            conv=channels(self.conv, 1),
            state=of_rank(self.state, 1, number, ranks),
        )


def draw(
    shape: Shape,
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    dtype: Any = torch.bfloat16,
    kept: Any = torch.float32,
    gates: str = "mixed",
    fresh: Sequence[int] = (),
    gone: Sequence[int] = (),
    tracked: dict[int, int] | None = None,
    bias: bool = False,
    equal_keys: bool = False,
    seed: int = 0,
) -> Step:
    """Draw a step; `requests` says what `fresh`, `gone` and `tracked` are, `kept` is the dtype of states."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    tokens, heads = sum(lengths), shape.value_heads
    who = requests(lengths, fresh, gone, tracked, seed)
    conv = torch.full((slots_of(lengths), shape.channels, shape.width - 1), NAN, dtype=dtype, device=device)
    state = torch.full((len(conv), heads, shape.values, shape.keys), NAN, dtype=kept, device=device)
    for number, slot in enumerate(who["slots"]):
        if number not in gone:
            state[slot] = 0 if number in fresh else normal(*state.shape[1:], kind=kept)
        if number not in fresh and number not in gone:
            conv[slot] = normal(*conv.shape[1:])
    least, most, offset = GATES[gates]
    mixed_qkv = normal(tokens, shape.channels)
    if equal_keys:
        # every key is the same: the triangular system is as far from the identity as it gets
        keys = slice(shape.key_heads * shape.keys, 2 * shape.key_heads * shape.keys)
        mixed_qkv[:, keys] = mixed_qkv[:1, keys].abs() + 1
    return Step(
        shape=shape,
        **who,
        mixed_qkv=mixed_qkv,
        a=normal(tokens, heads) + offset,
        b=normal(tokens, heads),
        conv_weights=normal(shape.channels, shape.width) * 0.5,
        bias=normal(shape.channels) if bias else None,
        A_log=torch.linspace(least, most, heads, device=device),
        dt_bias=normal(heads),
        conv=conv,
        state=state,
    )


class Launched(linear_extend_cases.Launched):
    """A step on the Triton implementation, or another one."""

    modules = implementation, metadata


def of_each_head(step: Step, after: After) -> dict[str, Any]:
    """RMS(error) / RMS(reference) of every head of every sequence of one length, against fp64."""
    exact, shape = wanted(step, kind=torch.float64), step.shape
    output = (len(step.lengths), step.lengths[0], shape.value_heads, shape.values)
    pairs = {
        "output": (after.output[: step.tokens].view(output).transpose(1, 2), exact.output.view(output).transpose(1, 2)),
        "state": (after.state[step.slots], exact.state),
    }
    return {
        name: ((got - right).square().mean((2, 3)) / right.square().mean((2, 3))).sqrt().flatten()
        for name, (got, right) in pairs.items()
    }
