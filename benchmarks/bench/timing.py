# SPDX-License-Identifier: Apache-2.0
"""Interleave measurements of all arms, so that drift affects them alike; needs no SGLang or torch."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence

LEAST_ROUNDS, WARM_UP, SEED = 5, 1, 0
# one measurement of an arm: values by name
Sample = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Summary of an arm's samples."""

    rounds: int
    median: float
    p20: float
    p80: float


def spread(samples: Sequence[float]) -> Spread:
    return Spread(len(samples), *(round(quantile(samples, part), 3) for part in (0.5, 0.2, 0.8)))


def quantile(samples: Sequence[float], part: float) -> float:
    """Interpolate linearly between the two nearest samples."""
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_turn(arms: Mapping[str, Callable[[], Sample]], rounds: int, warm_up: int = WARM_UP) -> dict[str, list[Sample]]:
    """Measure every arm once per round, in a shuffled order; discard the first rounds."""
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} rounds are too few for a spread; at least {LEAST_ROUNDS}")
    order, source = list(arms), random.Random(SEED)
    found: dict[str, list[Sample]] = {name: [] for name in arms}
    for number in range(-warm_up, rounds):
        source.shuffle(order)
        for name in order:
            sample = arms[name]()
            if number >= 0:
                found[name].append(sample)
    return found


def spreads(samples: Sequence[Sample]) -> dict[str, Spread]:
    return {name: spread([sample[name] for sample in samples]) for name in samples[0]}


def launch(
    work: Callable[[], object], synchronize: Callable[[], object], now: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds until the host has launched the work, and until the device has done it."""
    synchronize()
    began = now()
    work()
    host = now() - began
    synchronize()
    return {"wall": now() - began, "host": host}
