# SPDX-License-Identifier: Apache-2.0
"""Arms in turn, with a clock that only the arms move."""

from __future__ import annotations

import pytest

from benchmarks.bench import timing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_drifts_falls_on_all_arms_alike() -> None:
    """A machine that becomes three times slower on the way: one arm after the other would not show the ratio of two."""
    clock = Clock()

    def arm(cost: float) -> dict[str, float]:
        began = clock()
        clock.now += cost * (1 + clock.now / 100)
        return {"wall": clock() - began}

    found = timing.in_turn({"slow": lambda: arm(2), "fast": lambda: arm(1)}, rounds=31)
    slow, fast = (timing.spreads(found[name])["wall"] for name in ("slow", "fast"))
    assert slow.rounds == fast.rounds == 31
    assert slow.p20 < slow.median < slow.p80 and slow.p80 > 1.5 * slow.p20
    assert 1.9 < slow.median / fast.median < 2.1


def test_every_round_asks_every_arm_once_and_not_always_in_the_same_order() -> None:
    asked: list[str] = []

    def arm(name: str) -> dict[str, float]:
        asked.append(name)
        return {"wall": float(len(asked))}

    found = timing.in_turn({name: lambda name=name: arm(name) for name in "abc"}, rounds=9, warm_up=2)  # type: ignore[misc]
    rounds = ["".join(asked[start : start + 3]) for start in range(0, len(asked), 3)]
    assert len(rounds) == 11 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
    assert all(len(samples) == 9 and min(sample["wall"] for sample in samples) > 6 for samples in found.values())


def test_the_host_is_done_before_the_device() -> None:
    clock, device = Clock(), [0.0]

    def work() -> None:
        clock.now += 3
        device[0] = clock.now + 4

    def synchronize() -> None:
        clock.now = max(clock.now, device[0])

    device[0] = 10
    assert timing.launch(work, synchronize, clock) == {"wall": 7, "host": 3}


def test_spread() -> None:
    found = timing.spread([5, 1, 4, 2, 3, 6])
    assert (found.rounds, found.median, found.p20, found.p80) == (6, 3.5, 2, 5)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        timing.in_turn({"a": lambda: {"wall": 1.0}}, rounds=4)
