# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in fp32, token by token: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tests.kernels.accuracy import Results
from tests.kernels.linear_reference import convolved, side_by_side

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of one extend step of a layer, sequences back to back, as SGLang passes them to its kernels.

    mixed_qkv [tokens, channels], a and b [tokens, value heads], conv_weights [channels, width], A_log and dt_bias
    [value heads], bias [channels] or None; each sequence's earlier conv window [channels, width - 1] and state [value
    heads, values, keys].
    """

    lengths: Sequence[int]
    key_heads: int
    mixed_qkv: Any
    a: Any
    b: Any
    conv_weights: Any
    A_log: Any
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
    heads, size = inputs.state.shape[1], inputs.state.shape[3]
    lengths = torch.tensor(inputs.lengths, device=inputs.state.device)

    def padded(tensor: Any) -> Any:
        return side_by_side(tensor.to(kind), inputs.lengths)

    bias = None if inputs.bias is None else inputs.bias.to(kind)
    mixed, windows = convolved(
        inputs.mixed_qkv.to(kind), inputs.lengths, inputs.conv_weights.to(kind), bias, inputs.conv.to(kind)
    )
    query, key, value = padded(mixed).split(
        [inputs.key_heads * size, inputs.key_heads * size, heads * inputs.state.shape[2]], -1
    )

    def of_every_value_head(tensor: Any) -> Any:
        split = tensor.unflatten(-1, (inputs.key_heads, size))
        norm = (split.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        return (split / norm).repeat_interleave(heads // inputs.key_heads, 2)

    query, key = of_every_value_head(query) * size**-0.5, of_every_value_head(key)
    value = value.unflatten(-1, (heads, -1))
    decay = padded(-inputs.A_log.to(kind).exp() * functional.softplus(inputs.a.to(kind) + inputs.dt_bias.to(kind)))
    decay, gain = decay.exp(), padded(inputs.b).sigmoid()
    ragged = len(set(inputs.lengths)) > 1
    state, output = inputs.state.to(kind).clone(), torch.zeros_like(value)
    for step in range(max(inputs.lengths)):
        before = state
        state = state * decay[:, step, :, None, None]
        wanted = value[:, step] - (state * key[:, step, :, None]).sum(-1)
        state += (wanted * gain[:, step, :, None])[..., None] * key[:, step, :, None]
        output[:, step] = (state * query[:, step, :, None]).sum(-1)
        if ragged:
            state = torch.where((lengths > step)[:, None, None, None], state, before)
    real = torch.cat([row[:length] for row, length in zip(output, inputs.lengths, strict=True)])
    return Results(real, windows, state)
