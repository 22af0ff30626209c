# SPDX-License-Identifier: Apache-2.0
"""Memory that nobody holds in each release's own graph breaks, and the part that the fixes keep.

The ways that a tensor comes to a break are those of benchmarks/break_lifetimes.py, which asks the same on a GPU.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import RELEASES

OUTPUT_HELD_FROM = "0.5.16"
RIGHT_ANYWAY = {
    "written_by_the_graph_before_the_break",
    "written_by_the_graph_and_read_by_two_breaks",
    "returned_by_a_break",
    "returned_by_a_break_in_a_dictionary",
}
# what the second of two breaks reads is gone when replays have given its memory to somebody else
NEEDS_THE_OUTPUT, NEEDS_THE_INPUT = "returned_by_a_break_and_read_by_the_next", "made_before_the_capture"


@pytest.mark.parametrize("release", RELEASES)
def test_what_no_pool_keeps_is_kept_and_nothing_else(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(
        release_root(release),
        *("-m", "tests.scenarios.break_lifetimes", "every_way"),
        SGLANG_BCG_FIXES="off",
        SGLANG_BCG_FIX_BREAK_INPUT_LIFETIME="on",
        SGLANG_BCG_FIX_BREAK_OUTPUT_LIFETIME="on",
    )
    early = RELEASES.index(release) < RELEASES.index(OUTPUT_HELD_FROM)

    wrong = {NEEDS_THE_INPUT, *([NEEDS_THE_OUTPUT] if early else [])}
    ways = RIGHT_ANYWAY | {NEEDS_THE_OUTPUT, NEEDS_THE_INPUT}
    assert found["stock"] == {way: ["wrong answer" if way in wrong else "right", 0] for way in ways}
    assert found["undone"] == found["stock"]
    assert found["applied"] == ["break_input_lifetime", *(["break_output_lifetime"] if early else [])]
    assert not any(found["read back"].values())

    assert {way: answer for way, (answer, _) in found["fixed"].items()} == dict.fromkeys(ways, "right")
    assert found["without a pool"] == dict.fromkeys(ways, "right")
    kept = {way: count for way, (_, count) in found["fixed"].items()}
    assert kept["written_by_the_graph_before_the_break"] == kept["written_by_the_graph_and_read_by_two_breaks"] == 0
    # one tensor for each of three sizes
    assert kept[NEEDS_THE_INPUT] == 3

    assert found["unlike"]["everything is the pool's"] == found["stock"]
    held_all = found["unlike"]["nothing is the pool's"]
    assert held_all["written_by_the_graph_before_the_break"] == ["right", 6]
