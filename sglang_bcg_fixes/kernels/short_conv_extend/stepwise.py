# SPDX-License-Identifier: Apache-2.0
"""The reference, which can be captured: plain torch and fp32, without reading the batch on the host. For tests only."""

from __future__ import annotations

from typing import Any

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
from sglang_bcg_fixes.kernels.short_conv_extend import Shape

__all__ = ["Scratch", "Tables", "Tracking", "Tuning", "extend", "tuning_for"]


def extend(
    inputs: Any,
    *,
    shape: Shape,
    conv_weights: Any,
    bias: Any,
    conv: Any,
    tables: Tables,
    scratch: Scratch,
    output: Any,
    tuning: Tuning | None = None,
) -> None:
    """Run one layer, as the package's contract describes."""
    work = Work.of(output, tables, shape.width)
    output.copy_(convolved(work, inputs, conv_weights, bias, conv))
    turn_windows(work, inputs, conv, tracking=False)
