# SPDX-License-Identifier: Apache-2.0
"""The reference in capturable form: plain torch and fp32, token by token, without reading the batch on the host.

For tests only: a layer takes about ten torch operations for every row of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from sglang_bcg_fixes.kernels.gdn_extend import Shape
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
    mixed = convolved(work, mixed_qkv, conv_weights, bias, conv)
    turn_windows(work, mixed_qkv, conv, tracking)
    sizes = [shape.key_heads * shape.keys, shape.key_heads * shape.keys, shape.value_heads * shape.values]
    activated: Any = functional.silu(mixed)
    query, key, value = activated.split(sizes, 1)
    group = shape.value_heads // shape.key_heads

    def of_every_value_head(tensor: Any) -> Any:
        split = tensor.unflatten(1, (shape.key_heads, shape.keys))
        normed = split / (split.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        return normed[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)

    query, key = of_every_value_head(query) * shape.keys**-0.5, of_every_value_head(key)
    value = value.unflatten(1, (shape.value_heads, shape.values))
    decay = (-A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())).exp()[..., None, None]
    gain = b.float().sigmoid()[..., None]
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
