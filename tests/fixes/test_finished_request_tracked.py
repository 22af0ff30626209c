# SPDX-License-Identifier: Apache-2.0
"""Slots that a real pool and a real verification's preparation name for a request that has finished in between."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import finished_request_tracked as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
BATCH = "sglang/srt/managers/schedule_batch.py"
NO_INDEX = "'NoneType' object cannot be interpreted as an integer"


@pytest.mark.parametrize("release", ["0.5.13", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.20"])
def test_a_finished_request_saves_to_the_reserved_slot(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found = processes.beside(
        release_root(release), "-m", "tests.scenarios.finished_request", timeout=600, **settings.only(FIX.id)
    )[0]
    assert found["applied"] == [FIX.id]
    assert found["with"] == ["own", "reserved", "own"]
    assert found["without"] == (NO_INDEX if release < "0.5.16" else ["own", "the cache's", "own"])


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ("pass", Verdict.AFFECTED),
        ("batch.mamba_track_indices[freed_rows] = -1", Verdict.FIXED),
    ],
)
def test_a_later_source_is_read_and_not_guessed(
    release_root: Callable[[str], pathlib.Path], new: str, verdict: Verdict
) -> None:
    old = "batch.mamba_track_indices[freed_rows] = -1"
    assert fix.probe(Source(rewritten(release_root(NEWEST), BATCH, old, new))).verdict is verdict
