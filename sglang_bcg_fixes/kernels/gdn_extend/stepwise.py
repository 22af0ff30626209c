# SPDX-License-Identifier: Apache-2.0
"""The reference, which can be captured: plain torch and fp32, token by token, without reading the batch on the host.

For tests only: a layer takes about ten torch operations for every row of its output.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn import functional

from sglang_bcg_fixes.kernels.gdn_extend import Shape
from sglang_bcg_fixes.kernels.linear_extend.metadata import Tracking
from sglang_bcg_fixes.kernels.linear_extend.stepwise import (
    Scratch,
    Tables,
    Tuning,
    Work,
    by_the_delta_rule,
    convolved,
    tuning_for,
    turn_windows,
    walk,
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
    work = Work.of(output, tables, shape.width)
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
    current = state[work.slot.clamp(min=0)].float()
    walk(work, current, state, output, tracking, functools.partial(by_the_delta_rule, query, key, value, decay, gain))
