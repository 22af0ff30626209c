# SPDX-License-Identifier: Apache-2.0
"""Results of a linear layer, how far they are from the reference's, and how far they may be."""

from __future__ import annotations

import dataclasses
from typing import Any

# bounds of RMS(error) / RMS(reference) of each result: absolute, and as a multiple of SGLang's own error
TOLERANCE, OF_SGLANGS = 0.005, 1.2
# SGLang's own kernels round to bfloat16 in many places, and are off by 0.004 to 0.005
TOLERANCE_OF_SGLANG = 0.01


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of one layer: the output, and each sequence's window and state in the pools."""

    output: Any
    conv: Any
    state: Any


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


def why_wrong(found: dict[str, float], of_sglang: dict[str, float] | None, times: float = OF_SGLANGS) -> str:
    """Name the results that are too far off, NaN included, or return an empty string.

    Without `of_sglang` the results are SGLang's own, which have a wider limit.
    """
    far = []
    for name, value in found.items():
        limit = TOLERANCE_OF_SGLANG
        if of_sglang is not None:
            limit = min(TOLERANCE, times * of_sglang.get(name, TOLERANCE))
        if not value <= limit:
            far.append(f"{name} by {value:.4f}, not {limit:.4f} at most")
    return f"off from the fp32 reference: {', '.join(far)}" if far else ""
