# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba2 in fp32, token by token: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes.kernels.mamba2_extend import Shape
from tests.kernels.accuracy import Results
from tests.kernels.linear_reference import convolved, side_by_side


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one extend step of a layer, sequences back to back, as SGLang passes them to its kernels.

    inputs [tokens, channels], dt [tokens, heads], conv_weights [channels, width], A, D and dt_bias [heads], bias
    [channels] or None; each sequence's earlier conv window [channels, width - 1] and state [heads, head, states].
    """

    lengths: Sequence[int]
    shape: Shape
    inputs: Any
    dt: Any
    conv_weights: Any
    A: Any
    D: Any
    dt_bias: Any
    conv: Any
    state: Any
    bias: Any = None


def recurrent(inputs: Inputs, kind: Any = None) -> Results:
    """Run all sequences in parallel, token by token; the shorter ones are masked at their end.

    In fp32, or in the dtype `kind`: in fp64 its own rounding does not count, however long the sequences are.
    """
    import torch
    from torch.nn import functional

    kind = kind or torch.float32
    shape = inputs.shape
    lengths = torch.tensor(inputs.lengths, device=inputs.state.device)

    def padded(tensor: Any) -> Any:
        return side_by_side(tensor, inputs.lengths)

    bias = None if inputs.bias is None else inputs.bias.to(kind)
    mixed, windows = convolved(
        inputs.inputs.to(kind), inputs.lengths, inputs.conv_weights.to(kind), bias, inputs.conv.to(kind)
    )
    of_groups = shape.groups * shape.states
    x, to_state, from_state = padded(mixed).split([shape.inner, of_groups, of_groups], -1)
    x = x.unflatten(-1, (shape.heads, shape.head))

    def of_every_head(tensor: Any) -> Any:
        return tensor.unflatten(-1, (shape.groups, shape.states)).repeat_interleave(shape.heads // shape.groups, 2)

    to_state, from_state = of_every_head(to_state), of_every_head(from_state)
    step = functional.softplus(padded(inputs.dt.to(kind) + inputs.dt_bias.to(kind)))
    step = step.clamp(shape.least_step, shape.most_step)
    decay, through = (step * inputs.A.to(kind)).exp(), inputs.D.to(kind)[:, None]
    ragged = len(set(inputs.lengths)) > 1
    state, output = inputs.state.to(kind).clone(), torch.zeros_like(x)
    for number in range(max(inputs.lengths)):
        before = state
        added = (x[:, number] * step[:, number, :, None])[..., None] * to_state[:, number, :, None]
        state = state * decay[:, number, :, None, None] + added
        output[:, number] = (state * from_state[:, number, :, None]).sum(-1) + through * x[:, number]
        if ragged:
            state = torch.where((lengths > number)[:, None, None, None], state, before)
    real = torch.cat([row[:length] for row, length in zip(output, inputs.lengths, strict=True)])
    return Results(real, windows, state)
