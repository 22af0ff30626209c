# SPDX-License-Identifier: Apache-2.0
"""Slots of checkpoints around a prefill, on a real overlapping scheduler: red, green, and a right release."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.fixes import settings
from tests.fixes.test_boundary_counted_twice import MIXED, SERVER
from tests.wheels import NEWEST

FIX = "slots_not_exchanged"
AFFECTED = ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
# when the second request arrives, so that its prefill comes before or after the first one's step at the boundary of 16
BEFORE, AFTER, LATER = 3, 4, 5
# how many tokens the first one has in the end: with 20 it ends while its step at the boundary of 32 is in flight
ENDS = 20
ARRIVALS = [(BEFORE, ENDS), (AFTER, ENDS), (LATER, ENDS), (AFTER, 19), (AFTER, 22)]
Run = Callable[..., Any]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Run:
    def run(release: str, arrivals: list[tuple[int, int]], **server: Any) -> Any:
        given = json.dumps(SERVER | server | {"arrivals": arrivals})
        arguments = ("-m", "tests.scenarios.arriving_requests", "falcon_h1", given)
        return processes.beside(release_root(release), *arguments, timeout=600, **settings.only(FIX))[0]

    return run


@pytest.mark.forms_of(FIX)
@pytest.mark.parametrize("release", AFFECTED)
def test_the_next_boundary_leaves_the_last_checkpoint_alone(run: Run, release: str) -> None:
    found = run(release, ARRIVALS)
    assert found["applied"] == [FIX]
    assert found["without"] == [[16, False], [16, False], [16, True], [16, True], [32, True]]
    assert found["with"] == [[16, True], [16, True], [16, True], [16, True], [32, True]]


def test_a_mixed_step_exchanges_nothing(run: Run) -> None:
    # the first request is at the boundary of 32 in a mixed step, and at that of 48 when it ends
    arrivals = [(19, 36), (19, 35)]
    found = run(NEWEST, arrivals, **MIXED)
    assert found["applied"] == [FIX]
    assert found["without"] == [[16, False], [16, True]]
    assert found["with"] == [[16, True], [16, True]]


def test_a_release_that_exchanges_them_once_is_left_as_it_is(run: Run) -> None:
    assert run("0.5.17", [(LATER, 22)]) == {"applied": [], "without": [[32, True]]}
