# SPDX-License-Identifier: Apache-2.0
"""Kimi's delta rule in fp32, token by token: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang_bcg_fixes.kernels.kda_extend import Shape
from tests.kernels.accuracy import Results
from tests.kernels.linear_reference import convolved, side_by_side

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one extend step of a layer, sequences back to back, as SGLang passes them to its kernels.

    mixed_qkv [tokens, channels], a [tokens, heads * keys], b [tokens, heads], conv_weights [channels, width], A_log
    [heads], dt_bias [heads * keys], bias [channels] or None; each sequence's earlier conv window [channels, width - 1]
    and state [heads, values, keys].
    """

    lengths: Sequence[int]
    shape: Shape
    mixed_qkv: Any
    a: Any
    b: Any
    conv_weights: Any
    A_log: Any
    dt_bias: Any
    conv: Any
    state: Any
    bias: Any = None
    is_squashed: bool = False


def gates(a: Any, A_log: Any, dt_bias: Any, shape: Shape) -> Any:
    """Return the logarithms of what each key of a state is multiplied by, [..., heads, keys], in the dtype of `a`."""
    from torch.nn import functional

    x = (a + dt_bias.to(a.dtype)).unflatten(-1, (shape.heads, shape.keys))
    rate = A_log.to(a.dtype).exp()[:, None]
    if shape.lower_bound is not None:
        return shape.lower_bound * (rate * x).sigmoid()
    return -rate * functional.softplus(x)


def recurrent(inputs: Inputs, kind: Any = None) -> Results:
    """Run all sequences in parallel, token by token; the shorter ones are masked at their end.

    In fp32, or in the dtype `kind`: in fp64 its own rounding does not count, however long the sequences are.
    """
    import torch

    kind = kind or torch.float32
    shape = inputs.shape
    lengths = torch.tensor(inputs.lengths, device=inputs.state.device)

    def padded(tensor: Any) -> Any:
        return side_by_side(tensor.to(kind), inputs.lengths)

    bias = None if inputs.bias is None else inputs.bias.to(kind)
    mixed, windows = convolved(
        inputs.mixed_qkv.to(kind), inputs.lengths, inputs.conv_weights.to(kind), bias, inputs.conv.to(kind)
    )
    of_keys, of_values = shape.heads * shape.keys, shape.heads * shape.values
    query, key, value = (
        tensor.unflatten(-1, (shape.heads, -1)) for tensor in padded(mixed).split([of_keys, of_keys, of_values], -1)
    )

    def normed(tensor: Any) -> Any:
        return tensor / (tensor.square().sum(-1, keepdim=True) + EPSILON).sqrt()

    query, key = normed(query) * shape.keys**-0.5, normed(key)
    decay = gates(padded(inputs.a), inputs.A_log, inputs.dt_bias, shape).exp()
    gain = padded(inputs.b) if inputs.is_squashed else padded(inputs.b).sigmoid()
    ragged = len(set(inputs.lengths)) > 1
    state, output = inputs.state.to(kind).clone(), torch.zeros_like(value)
    for step in range(max(inputs.lengths)):
        before = state
        state = state * decay[:, step, :, None]
        wanted = value[:, step] - (state * key[:, step, :, None]).sum(-1)
        state += (wanted * gain[:, step, :, None])[..., None] * key[:, step, :, None]
        output[:, step] = (state * query[:, step, :, None]).sum(-1)
        if ragged:
            state = torch.where((lengths > step)[:, None, None, None], state, before)
    real = torch.cat([row[:length] for row, length in zip(output, inputs.lengths, strict=True)])
    return Results(real, windows, state)
