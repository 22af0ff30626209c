# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Inkling's prefill graphs write, on the real runner: red, green, and a release that is right."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.fixes import settings

FIX = "prefill_track_tail"
# batches of four, three, one, one and two requests
RIGHT = [[1, 2, 3, 4], [5, 6], [], [7], [8]]
# an earlier batch's last requests still have their slots
STOCK = [[1, 2, 3, 4], [4, 5, 6], [4, 6], [4, 6, 7], [4, 6, 8]]
Run = Callable[[str], Any]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Run:
    def run(release: str) -> Any:
        root = release_root(release)
        return processes.beside(root, "-m", "tests.scenarios.prefill_checkpoints", **settings.only(FIX))[0]

    return run


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_a_replay_writes_the_checkpoints_of_its_own_requests_only(run: Run, release: str) -> None:
    assert run(release) == {"applied": [FIX], "with": RIGHT, "without": STOCK}


def test_a_release_that_writes_no_others_is_left_as_it_is(run: Run) -> None:
    assert run("0.5.18") == {"applied": [], "with": RIGHT, "without": RIGHT}
