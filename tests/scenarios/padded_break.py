# SPDX-License-Identifier: Apache-2.0
"""The forward context of a break that is given padded rows, in place of a runner's."""

from __future__ import annotations

import types
from typing import Any

import torch


def tail_of(output: torch.Tensor, expected: torch.Tensor) -> list[Any]:
    """Tell what the rows for padding hold, and whether the others are as expected."""
    tail = output[len(expected) :]
    kind = "nan" if tail.isnan().all() else "zero" if (tail == 0).all() else "other"
    return [kind, bool((output[: len(expected)] == expected).all())]


def enter(radix_attention: types.ModuleType, batch: Any, rows: int, real: int) -> None:
    """Let this release's attention find a batch of `rows` tokens of which `real` are not padding."""
    context = types.SimpleNamespace(
        forward_batch=batch, attention_layers=[None], mha_companion_layers=None, num_tokens=rows, raw_num_tokens=real
    )
    for name in ("get_tc_piecewise_forward_context", "get_forward_context"):
        if hasattr(radix_attention, name):
            setattr(radix_attention, name, lambda: context)
