# SPDX-License-Identifier: Apache-2.0
"""Whose memory an address is, as the allocator tells it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy.graph_pool import PoolMemory, say_that_nothing_is_kept

POOL, OTHER, ORDINARY = (0, 7), (0, 8), (0, 0)
# two of the pool with a gap between them, and memory of others on both sides
SEGMENTS = ((1000, 100, OTHER), (1100, 100, POOL), (1300, 50, POOL), (1350, 100, ORDINARY))


class Allocator:
    """Tells its segments in no order, and counts how often it is asked."""

    def __init__(self) -> None:
        self.segments = list(SEGMENTS)
        self.asked = 0

    def snapshot(self) -> list[dict[str, Any]]:
        self.asked += 1
        return [
            {"address": begin, "total_size": size, "segment_pool_id": list(pool)}
            for begin, size, pool in reversed(self.segments)
        ]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_snapshot", allocator.snapshot)
    return allocator


@pytest.mark.parametrize(
    ("address", "is_the_pools"),
    [
        (999, False),
        (1000, False),
        (1099, False),
        (1100, True),
        (1199, True),
        (1200, False),
        (1299, False),
        (1300, True),
        (1349, True),
        (1350, False),
        (1449, False),
        (1450, False),
    ],
)
@pytest.mark.parametrize("was_asked", [False, True])
def test_a_segment_is_the_pools_from_its_first_byte_to_its_last(
    allocator: Allocator, address: int, is_the_pools: bool, was_asked: bool
) -> None:
    memory = PoolMemory(POOL)
    if was_asked:
        memory.holds(SEGMENTS[0][0])
    assert memory.holds(address) is is_the_pools


@pytest.mark.parametrize("begin", [1200, 1500, 900])
def test_a_segment_that_is_new_is_asked_for(allocator: Allocator, begin: int) -> None:
    memory = PoolMemory(POOL)
    assert not memory.holds(begin)
    allocator.segments.append((begin, 100, POOL))
    assert memory.holds(begin) and memory.holds(begin + 99)
    assert allocator.asked == 2


def test_of_an_allocator_that_tells_nothing_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("Calling snapshot with backend:cudaMallocAsync is not meaningful")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    say_that_nothing_is_kept.cache_clear()
    for memory in (PoolMemory(POOL), PoolMemory(OTHER)):
        assert memory.holds(1000) and memory.holds(2**47)
    assert caplog.text.count("does not tell which memory is a graph's") == 1


def test_what_the_allocator_has_told_of_is_not_asked_for_again(allocator: Allocator) -> None:
    memory = PoolMemory(POOL)
    assert [memory.holds(address) for address in (1100, 1199, 1300, 1349, 1000, 1449)] == [True] * 4 + [False] * 2
    assert allocator.asked == 1


@pytest.mark.parametrize("address", [1100, 1350, 1449, 1450])
def test_the_number_of_ordinary_memory_is_no_pool(allocator: Allocator, address: int) -> None:
    assert not PoolMemory(ORDINARY).holds(address)
