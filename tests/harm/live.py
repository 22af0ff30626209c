# SPDX-License-Identifier: Apache-2.0
"""The rows that every run of the tests makes again: few enough for minutes, and all of every release among them."""

from __future__ import annotations

from tests import wheels
from tests.harm import matrix
from tests.harm.matrix import OFF, PATCHED, STOCK

# runs in every release, stock, patched and switched off
ALWAYS = "LlamaForCausalLM"
# seconds of rows in each release: enough for each architecture once, and for many of them several times
BUDGET, LARGE_BUDGET = 4.0, 11.0


def chosen(budget: float = BUDGET) -> dict[str, list[tuple[str, str]]]:
    """Release -> architectures and arms. Each architecture runs in one release or more, while the budget lasts.

    The slowest are given away first, each to the release with the least to do. What is left of a release's budget goes
    to the architectures that have been run the least.
    """
    seconds = {release: running(release) for release in wheels.RELEASES}
    known = {release: costs for release, costs in seconds.items() if costs}
    work: dict[str, list[str]] = {release: [] for release in known}
    times = {name: 0 for costs in known.values() for name in costs if name != ALWAYS}
    slowest = {name: max(costs.get(name, 0.0) for costs in known.values()) for name in times}

    def spent(release: str) -> float:
        return sum(known[release][name] for name in work[release])

    def place(name: str) -> bool:
        free = [
            release
            for release, costs in known.items()
            if name in costs and name not in work[release] and spent(release) + costs[name] <= budget
        ]
        if free:
            work[min(free, key=spent)].append(name)
            times[name] += 1
        return bool(free)

    for name in sorted(times, key=lambda name: (-slowest[name], name)):
        place(name)
    # once each is in, again and again while there is room
    left = sorted(times, key=lambda name: (slowest[name], name))
    while left := [name for name in left if place(name)]:
        left.sort(key=lambda name: (times[name], slowest[name], name))
    always = [(ALWAYS, arm) for arm in (PATCHED, OFF)]
    return {release: [*always, *((name, PATCHED) for name in names)] for release, names in work.items()}


def running(release: str) -> dict[str, float]:
    """The seconds that each architecture takes that is demanded of every release."""
    rows = matrix.recorded(release)
    return {
        name: max(row.get("seconds", 0.0), rows.get((name, PATCHED), {}).get("seconds", 0.0))
        for (name, arm), row in rows.items()
        if arm == STOCK and name in matrix.IN_EVERY_RELEASE
    }
