# SPDX-License-Identifier: Apache-2.0
"""Slots that a real pool and a real verification's preparation name for a request that has finished in between."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "finished_request_tracked"
BATCH = "sglang/srt/managers/schedule_batch.py"
NO_INDEX = "'NoneType' object cannot be interpreted as an integer"


@pytest.mark.parametrize("release", ["0.5.13", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.20"])
def test_a_finished_request_saves_to_the_reserved_slot(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.finished_request")
    assert found["applied"] == [FIX]
    assert found["with"] == ["own", "reserved", "own"]
    assert found["without"] == (NO_INDEX if release < "0.5.16" else ["own", "the cache's", "own"])


@pytest.mark.parametrize(
    ("new", "verdict"), [("pass", Verdict.AFFECTED), ("batch.mamba_track_indices[freed_rows] = -1", Verdict.FIXED)]
)
def test_a_later_source_is_read_and_not_guessed(new: str, verdict: Verdict) -> None:
    old = "batch.mamba_track_indices[freed_rows] = -1"
    assert alone.verdict(FIX, NEWEST, BATCH, old, new) is verdict
