# SPDX-License-Identifier: Apache-2.0
"""Comparison of two runs of one batch, layer by layer, and their first difference.

Nothing is guessed about rounding that can be measured: each batch runs eagerly twice, and what these two runs differ by
is allowed to a replay four times over. Where they are equal in every bit, a replay may still take another kernel for
the same product, so it may differ by what rounding each layer twice would do, growing as a random walk. What is rounded
is in the model's numbers or in the values' own, whichever are coarser: a state in fp32 is made of products in bfloat16.
Behind experts, and in the logits, rounding may send a token to another one, and a few tokens are compared: only what no
rounding explains counts there, as everywhere in the end.
A graph that reads what it must not gives something unrelated: a difference about as large as the values.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sglang_bcg_fixes.process.selfcheck.pools import Place

LOGITS = "logits"
TIMES_THE_NOISE = 4
ROUNDINGS_A_LAYER = 2
# of the size of the values: what rounding may at most explain
MOST = 0.2


@dataclasses.dataclass(frozen=True)
class Observation:
    """The values that one run of a batch wrote in one layer, or answered."""

    layer: int
    kind: str
    values: Any


@dataclasses.dataclass(frozen=True)
class Difference:
    """The distance of two runs in one place, relative to the size of the values, and its limit."""

    layer: int
    kind: str
    found: float
    noise: float
    allowed: float

    @property
    def is_too_large(self) -> bool:
        # not a number is larger than anything
        return not self.found <= self.allowed

    def __str__(self) -> str:
        return f"{self.found:.3g} of their size, where {self.allowed:.3g} is rounding"


def observe(places: list[Place], logits: Any) -> list[Observation]:
    found = [Observation(each.layer, each.kind, each.sample()) for each in places]
    last = max((each.layer for each in found), default=0)
    return [*found, Observation(last, LOGITS, logits)]


def differences(
    eager: list[Observation],
    again: list[Observation],
    replayed: list[Observation],
    dtype: Any,
    routed: float = math.inf,
) -> list[Difference]:
    """In the order of the layers, of a model that computes in this dtype; `routed` is its first layer with experts."""
    noises, ones, others = (
        distances(one, other).tolist() for one, other in ((eager, again), (eager, replayed), (again, replayed))
    )
    return [
        Difference(each.layer, each.kind, min(one, other), noise, allowed(each, noise, dtype, routed))
        for each, noise, one, other in zip(eager, noises, ones, others, strict=True)
    ]


def allowed(place: Observation, noise: float, dtype: Any, routed: float = math.inf) -> float:
    import torch

    if place.kind == LOGITS or place.layer > routed:
        return MOST
    eps = max(torch.finfo(each).eps for each in (place.values.dtype, dtype))
    rounding = ROUNDINGS_A_LAYER * eps * (place.layer + 1) ** 0.5
    return float(min(max(TIMES_THE_NOISE * noise, rounding), MOST))


def distances(ones: list[Observation], others: list[Observation]) -> Any:
    """By place: 0 if all is equal, 1.4 if unrelated; computed on the device, without waiting."""
    import torch

    found = []
    for one, other in zip(ones, others, strict=True):
        a, b = one.values.double().flatten(), other.values.double().flatten()
        # where both are nothing but zeros, they are equal
        found.append((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(torch.finfo(torch.double).tiny))
    return torch.stack(found)


def is_blind(eager: list[Observation]) -> bool:
    """Tell whether the run wrote nothing to compare: such a check must not call it right."""
    return not any(each.values.float().any() for each in eager if each.kind != LOGITS)
