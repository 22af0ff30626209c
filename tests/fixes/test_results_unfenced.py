# SPDX-License-Identifier: Apache-2.0
"""Waits of SGLang's own overlapped scheduler for the steps that it launches: red, green, and releases without a fix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone

FIX = "results_unfenced"


def run(release: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.fenced_results")


@pytest.mark.parametrize("release", ["0.5.14", "0.5.15", "0.5.15.post1"])
def test_results_are_processed_behind_the_reads_of_the_step_that_was_launched(release: str) -> None:
    found = run(release)
    assert found["applied"] == [FIX]
    assert found["without"]["beside"] == {"next batch": 0, "results": 1}
    assert found["with"]["beside"] == {"next batch": 0, "results": 0}
    # the wait has been moved: each step is waited for once
    assert found["with"]["waits"] <= found["without"]["waits"]


@pytest.mark.parametrize(
    ("release", "beside"),
    [
        ("0.5.11", {"next batch": 7, "results": 7}),
        ("0.5.12.post1", {"next batch": 7, "results": 7}),
        ("0.5.13.post1", {"next batch": 0, "results": 1}),
    ],
)
def test_releases_of_schedule_writes_unfenced_write_beside_steps(release: str, beside: Any) -> None:
    found = run(release)
    assert found["applied"] == []
    assert found["without"]["beside"] == beside


def test_a_release_that_waits_there_is_left_as_it_is() -> None:
    found = run("0.5.16")
    assert found["applied"] == []
    assert found["without"]["beside"] == {"next batch": 0, "results": 0}
