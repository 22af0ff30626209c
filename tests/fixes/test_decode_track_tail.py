# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that decode graphs of Falcon-H1 leave, on the real runner: red, green, and releases that are right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "decode_track_tail"
AFFECTED = ("0.5.15", "0.5.15.post1", "0.5.16")
# requests at a boundary in the first and the second decode step of each batch
AT_A_BOUNDARY = {
    "one": (1, 0),
    "two in three": (1, 1),
    "three": (3, 0),
    "as many as the largest graph": (6, 0),
    "one after six": (0, 1),
    "four in five": (2, 1),
    "five": (0, 5),
    "none at a boundary": (0, 0),
}
# request n has its state in slot 2n - 1, and the scheduler looks for its checkpoint in slot 2n. The buffer has an entry
# for each of six requests
WRONG = {
    # the last entries are those of the batch of six that ran with the fix before
    "one": ([2, 12], []),
    # the graph has three rows: the first request of the batch writes to the fourth of the six, and so on
    "two in three": ([2, 8], [4, 10]),
    "three": ([2, 4, 6, 8, 10, 12], []),
    "as many as the largest graph": ([], []),
    "one after six": ([], [2, 12]),
    # each request writes to the next one's slot, and the last one to the slot of the padded row, which is 0
    "four in five": ([0, 2, 4, 8], [6, 8]),
    "five": ([], [2, 4, 6, 8, 10, 12]),
    "none at a boundary": ([], []),
}
RIGHT = {
    batch: [{"saved": [True] * number, "wrong slots": []} for number in steps] for batch, steps in AT_A_BOUNDARY.items()
}
STOCK = {
    batch: [
        {"saved": [not wrong] * number, "wrong slots": wrong} for number, wrong in zip(steps, WRONG[batch], strict=True)
    ]
    for batch, steps in AT_A_BOUNDARY.items()
}


def run(release: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.decode_checkpoints")


@pytest.mark.parametrize("release", AFFECTED)
def test_a_replayed_decode_saves_states_where_the_scheduler_looks_for_them(release: str) -> None:
    assert run(release) == {"applied": [FIX], "without": STOCK, "with": RIGHT}


@pytest.mark.parametrize("release", ["0.5.14", "0.5.17", NEWEST])
def test_releases_that_save_them_there_are_left_as_they_are(release: str) -> None:
    assert run(release) == {"applied": [], "without": RIGHT}
