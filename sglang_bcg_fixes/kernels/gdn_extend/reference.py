# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in fp32, token by token: slow, and simple enough to be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# bounds of RMS(error) / RMS(reference) of each result: absolute, and as a multiple of SGLang's own error
TOLERANCE, OF_SGLANGS = 0.005, 1.2
# SGLang's own kernels round to bfloat16 in many places, and are off by 0.004 to 0.005
TOLERANCE_OF_SGLANG = 0.01
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of one layer: the output, and each sequence's window and state in the pools."""

    output: Any
    conv: Any
    state: Any


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

    def side_by_side(tensor: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence(tensor.to(kind).split(list(inputs.lengths)), batch_first=True)

    mixed, windows = [], []
    for before, after in zip(inputs.conv.to(kind), inputs.mixed_qkv.to(kind).split(list(inputs.lengths)), strict=True):
        window = torch.cat([before, after.T], 1)
        # not torch's convolution, which may use TF32
        width = inputs.conv_weights.shape[1]
        taps = torch.stack([window[:, tap : tap + len(after)] for tap in range(width)], -1)
        convolved = (taps * inputs.conv_weights.to(kind)[:, None]).sum(-1)
        if inputs.bias is not None:
            convolved = convolved + inputs.bias.to(kind)[:, None]
        mixed.append(functional.silu(convolved).T)
        windows.append(window[:, -before.shape[1] :])
    query, key, value = side_by_side(torch.cat(mixed)).split(
        [inputs.key_heads * size, inputs.key_heads * size, heads * inputs.state.shape[2]], -1
    )

    def of_every_value_head(tensor: Any) -> Any:
        split = tensor.unflatten(-1, (inputs.key_heads, size))
        norm = (split.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        return (split / norm).repeat_interleave(heads // inputs.key_heads, 2)

    query, key = of_every_value_head(query) * size**-0.5, of_every_value_head(key)
    value = value.unflatten(-1, (heads, -1))
    decay = side_by_side(
        -inputs.A_log.to(kind).exp() * functional.softplus(inputs.a.to(kind) + inputs.dt_bias.to(kind))
    )
    decay, gain = decay.exp(), side_by_side(inputs.b).sigmoid()
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
    return Results(real, torch.stack(windows), state)


def errors(found: Results, wanted: Results) -> dict[str, float]:
    """Return RMS(error) / RMS(reference) of each result; NaN stays NaN."""
    return {
        field.name: relative(getattr(found, field.name), getattr(wanted, field.name))
        for field in dataclasses.fields(Results)
    }


def relative(found: Any, wanted: Any) -> float:
    differences = found.float() - wanted.float()
    wrong, size = (float(each.square().mean().sqrt()) for each in (differences, wanted.float()))
    if not size:
        return float("inf") if wrong else 0.0
    return wrong / size


def why_wrong(found: dict[str, float], of_sglang: dict[str, float] | None) -> str:
    """Name the results that are too far off, NaN included, or return an empty string.

    Without `of_sglang` the results are SGLang's own, which have a wider limit.
    """
    far = []
    for name, value in found.items():
        limit = TOLERANCE_OF_SGLANG
        if of_sglang is not None:
            limit = min(TOLERANCE, OF_SGLANGS * of_sglang.get(name, TOLERANCE))
        if not value <= limit:
            far.append(f"{name} by {value:.4f}, not {limit:.4f} at most")
    return f"off from the fp32 reference: {', '.join(far)}" if far else ""
