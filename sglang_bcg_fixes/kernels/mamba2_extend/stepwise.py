# SPDX-License-Identifier: Apache-2.0
"""The reference in capturable form: plain torch and fp32, token by token, without reading the batch on the host.

For tests only: a layer takes about ten torch operations for every row of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

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
from sglang_bcg_fixes.kernels.mamba2_extend import Shape

__all__ = ["Scratch", "Tables", "Tracking", "Tuning", "extend", "tuning_for"]


def extend(
    inputs: Any,
    dt: Any,
    *,
    shape: Shape,
    conv_weights: Any,
    bias: Any,
    A: Any,
    D: Any,
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
    mixed: Any = functional.silu(convolved(work, inputs, conv_weights, bias, conv))
    turn_windows(work, inputs, conv, tracking)
    of_groups = shape.groups * shape.states
    x, to_state, from_state = mixed.split([shape.inner, of_groups, of_groups], 1)
    x = x.unflatten(1, (shape.heads, shape.head))

    def of_every_head(tensor: Any) -> Any:
        split = tensor.unflatten(1, (shape.groups, shape.states))
        return split[:, :, None].expand(-1, -1, shape.heads // shape.groups, -1).flatten(1, 2)

    to_state, from_state = of_every_head(to_state), of_every_head(from_state)
    step = functional.softplus(dt.float() + dt_bias.float()).clamp(shape.least_step, shape.most_step)
    decay = (step * A.float()).exp()[..., None, None]
    added = (x * step[..., None])[..., None] * to_state[:, :, None]
    # one state a sequence, in fp32 until its end
    current = torch.where(
        (work.works & (work.continued != 0))[:, None, None, None], state[work.slot.clamp(min=0)].float(), 0.0
    )
    if tracking:
        work.keep_where(work.works & (work.after == 0), work.track_slot, state, current.to(state.dtype))
    for row in range(output.shape[0]):
        here = work.sequence_of_row[row : row + 1]
        before = current.index_select(0, here)[0]
        after = before * decay[row] + added[row]
        read = (after * from_state[row, :, None]).sum(-1) + D.float()[:, None] * x[row]
        output[row].copy_(torch.where(work.is_live[row], read, 0.0))
        current.index_copy_(0, here, torch.where(work.is_live[row], after, before)[None])
        if tracking:
            ends = work.works & (work.start + work.after == row + 1) & (work.after > 0)
            rounded = after.to(state.dtype)
            work.keep_where(ends, work.track_slot, state, rounded[None].expand(len(ends), *after.shape))
    work.keep_where(work.works, work.slot, state, current.to(state.dtype))
