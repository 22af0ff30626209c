# SPDX-License-Identifier: Apache-2.0
"""Steps of Kimi delta attention that every implementation must get right, with NaN in all memory that it must not use.

The tests run them small, on Triton's interpreter; a GPU can run the same ones at a model's sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.kda_extend import Shape
from sglang_bcg_fixes.kernels.kda_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import metadata
from tests.kernels import accuracy, kda_reference, linear_extend_cases
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

# A_log from head to head, what gates are shifted by and multiplied by: heads that forget slowly and heads that forget
# at once; slow ones only; hardly at all; all at once; keys of one head of which some forget at once and others never
GATES = {
    "mixed": (-4.0, 2.0, 0.0, 1.0),
    "gentle": (-4.0, 0.0, 0.0, 1.0),
    "near 0": (-12.0, -8.0, 0.0, 1.0),
    "far below": (3.0, 6.0, 40.0, 1.0),
    "unlike": (0.0, 1.0, 0.0, 15.0),
}


@dataclasses.dataclass(frozen=True)
class Step(linear_extend_cases.Step):
    """Queries, keys and values of every token before the convolution, its gates and betas, and the layer's weights."""

    mixed_qkv: Any
    a: Any
    b: Any
    conv_weights: Any
    bias: Any
    A_log: Any
    dt_bias: Any
    is_squashed: bool

    of_tokens = ("mixed_qkv", "a", "b")
    of_layer = ("conv_weights", "bias", "A_log", "dt_bias", "is_squashed")

    @property
    def output_sizes(self) -> tuple[int, int]:
        return self.shape.heads, self.shape.values

    def recurrent(self, kind: Any) -> accuracy.Results:
        given = kda_reference.Inputs(
            self.lengths, self.shape, self.mixed_qkv, self.a, self.b, conv=self.conv, state=self.state, **self.weights
        )
        return kda_reference.recurrent(given, kind)


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
    is_squashed: bool = False,
    seed: int = 0,
) -> Step:
    """Draw a step; `requests` says what `fresh`, `gone` and `tracked` are, `kept` is the dtype of states."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    tokens, heads, of_keys = sum(lengths), shape.heads, shape.heads * shape.keys
    who = requests(lengths, fresh, gone, tracked, seed)
    # as SGLang has it: channels are next to each other
    conv = torch.full((slots_of(lengths), shape.width - 1, shape.channels), NAN, dtype=dtype, device=device)
    conv = conv.transpose(1, 2)
    state = torch.full((len(conv), heads, shape.values, shape.keys), NAN, dtype=kept, device=device)
    for number, slot in enumerate(who["slots"]):
        if number not in gone:
            state[slot] = 0 if number in fresh else normal(*state.shape[1:], kind=kept)
        if number not in fresh and number not in gone:
            conv[slot] = normal(*conv.shape[1:])
    least, most, offset, spread = GATES[gates]
    mixed_qkv = normal(tokens, shape.channels)
    if equal_keys:
        # every key is the same: the triangular system is as far from the identity as it gets
        mixed_qkv[:, of_keys : 2 * of_keys] = mixed_qkv[:1, of_keys : 2 * of_keys].abs() + 1
    betas = normal(tokens, heads)
    return Step(
        shape=shape,
        **who,
        mixed_qkv=mixed_qkv,
        a=normal(tokens, of_keys) * spread + offset,
        b=betas.sigmoid() if is_squashed else betas,
        conv_weights=normal(shape.channels, shape.width, kind=torch.float32) * 0.5,
        bias=normal(shape.channels) if bias else None,
        A_log=torch.linspace(least, most, heads, device=device),
        dt_bias=normal(of_keys, kind=torch.float32),
        is_squashed=is_squashed,
        conv=conv,
        state=state,
    )


class Launched(linear_extend_cases.Launched):
    """A step on the Triton implementation, or another one."""

    modules = implementation, metadata
