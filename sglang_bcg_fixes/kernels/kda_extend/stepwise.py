# SPDX-License-Identifier: Apache-2.0
"""The reference in capturable form: plain torch and fp32, token by token, without reading the batch on the host.

For tests only: a layer takes about ten torch operations for every row of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from sglang_bcg_fixes.kernels.kda_extend import Shape
from sglang_bcg_fixes.kernels.linear_extend.metadata import Tracking
from sglang_bcg_fixes.kernels.linear_extend.stepwise import (
    Scratch,
    Tables,
    Tuning,
    Work,
    convolved,
    tuning_for,
    turn_windows,
)

__all__ = ["Scratch", "Tables", "Tracking", "Tuning", "extend", "tuning_for"]

EPSILON = 1e-6


def gates(a: Any, A_log: Any, dt_bias: Any, shape: Shape) -> Any:
    """Return the logarithms of what each key of a state is multiplied by, [..., heads, keys], in the dtype of `a`."""
    x = (a + dt_bias.to(a.dtype)).unflatten(-1, (shape.heads, shape.keys))
    rate = A_log.to(a.dtype).exp()[:, None]
    if shape.lower_bound is not None:
        bounded: Any = shape.lower_bound * (rate * x).sigmoid()
        return bounded
    return -rate * functional.softplus(x)


def extend(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    *,
    shape: Shape,
    conv_weights: Any,
    bias: Any,
    A_log: Any,
    dt_bias: Any,
    is_squashed: bool,
    conv: Any,
    state: Any,
    tables: Tables,
    scratch: Scratch,
    output: Any,
    tracking: bool = False,
    tuning: Tuning | None = None,
) -> None:
    """Run one layer, as the package's contract describes."""
    if output.shape[0] > tables.max_tokens:
        raise ValueError(
            f"an output of {output.shape[0]} rows, but the tables were made for {tables.max_tokens} tokens"
        )
    work = Work(output.shape[0], tables.sequences, shape.width - 1)
    mixed: Any = functional.silu(convolved(work, mixed_qkv, conv_weights, bias, conv))
    turn_windows(work, mixed_qkv, conv, tracking)
    of_keys, of_values = shape.heads * shape.keys, shape.heads * shape.values
    query, key, value = (
        tensor.unflatten(1, (shape.heads, -1)) for tensor in mixed.split([of_keys, of_keys, of_values], 1)
    )

    def normed(tensor: Any) -> Any:
        return tensor / (tensor.square().sum(-1, keepdim=True) + EPSILON).sqrt()

    query, key = normed(query) * shape.keys**-0.5, normed(key)
    decay = gates(a.float(), A_log, dt_bias, shape).exp()[:, :, None]
    gain = (b.float() if is_squashed else b.float().sigmoid())[..., None]
    # one state a sequence, in fp32 until its end
    current = state[work.slot.clamp(min=0)].float()
    if tracking:
        work.keep_where(work.works & (work.after == 0), work.track_slot, state, current.to(state.dtype))
    for row in range(output.shape[0]):
        here = work.sequence_of_row[row : row + 1]
        before = current.index_select(0, here)[0]
        decayed = before * decay[row]
        wanted = value[row] - (decayed * key[row, :, None]).sum(-1)
        after = decayed + (wanted * gain[row])[..., None] * key[row, :, None]
        read = (after * query[row, :, None]).sum(-1)
        output[row].copy_(torch.where(work.is_live[row], read, 0.0))
        current.index_copy_(0, here, torch.where(work.is_live[row], after, before)[None])
        if tracking:
            ends = work.works & (work.start + work.after == row + 1) & (work.after > 0)
            rounded = after.to(state.dtype)
            work.keep_where(ends, work.track_slot, state, rounded[None].expand(len(ends), *after.shape))
    work.keep_where(work.works, work.slot, state, current.to(state.dtype))
