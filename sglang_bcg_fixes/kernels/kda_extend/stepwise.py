# SPDX-License-Identifier: Apache-2.0
"""The reference, which can be captured: plain torch and fp32, token by token, without reading the batch on the host.

For tests only: a layer takes about ten torch operations for every row of its output.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.nn import functional

from sglang_bcg_fixes.kernels.kda_extend import Shape
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
    work = Work.of(output, tables, shape.width)
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
    current = state[work.slot.clamp(min=0)].float()
    walk(work, current, state, output, tracking, functools.partial(by_the_delta_rule, query, key, value, decay, gain))
