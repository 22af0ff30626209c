# SPDX-License-Identifier: Apache-2.0
"""The reference, which can be captured: plain torch and fp32, token by token, without reading the batch on the host.

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
    walk,
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
    work = Work.of(output, tables, shape.width)
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
    current = torch.where(
        (work.works & (work.continued != 0))[:, None, None, None], state[work.slot.clamp(min=0)].float(), 0.0
    )

    def advance(row: int, before: Any) -> tuple[Any, Any]:
        after = before * decay[row] + added[row]
        return after, (after * from_state[row, :, None]).sum(-1) + D.float()[:, None] * x[row]

    walk(work, current, state, output, tracking, advance)
