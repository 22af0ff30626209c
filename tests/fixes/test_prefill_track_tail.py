# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Inkling's prefill graphs write, on the real runner: red, green, and a release that is right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone

FIX = "prefill_track_tail"
# batches of four, three, one, one and two requests
RIGHT = [[1, 2, 3, 4], [5, 6], [], [7], [8]]
# an earlier batch's last requests still have their slots
STOCK = [[1, 2, 3, 4], [4, 5, 6], [4, 6], [4, 6, 7], [4, 6, 8]]


def run(release: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.prefill_checkpoints")


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_a_replay_writes_the_checkpoints_of_its_own_requests_only(release: str) -> None:
    assert run(release) == {"applied": [FIX], "with": RIGHT, "without": STOCK}


def test_a_release_that_writes_no_others_is_left_as_it_is() -> None:
    assert run("0.5.18") == {"applied": [], "with": RIGHT, "without": RIGHT}
