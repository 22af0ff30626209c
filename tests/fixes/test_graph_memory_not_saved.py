# SPDX-License-Identifier: Apache-2.0
"""Graphs whose memory a memory saver has released, in a release's own capture and adapter."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import graph_memory_not_saved as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
BACKEND = "sglang/srt/model_executor/runner_backend/full_cuda_graph_backend.py"
RIGHT = [[30.0, 60.0]] * 2
RIGHT_BY_ITSELF = "0.5.21"


# 0.5.14 is the first with a backend for these graphs, 0.5.20 the last without a copy, and 0.5.21 right by itself
@pytest.mark.parametrize("release", ["0.5.11", "0.5.13", "0.5.14", "0.5.17", "0.5.20", RIGHT_BY_ITSELF])
def test_a_replay_after_sleep_answers_as_before(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(
        release_root(release), "-m", "tests.scenarios.released_graph_memory", **settings.only(FIX.id)
    )
    if release == RIGHT_BY_ITSELF:
        assert found == {"applied": [], "without": RIGHT}
        return
    assert found["applied"] == [FIX.id]
    assert found["with"] == RIGHT
    before, after = found["without"]
    assert before == RIGHT[0]
    assert all(number != number for number in after)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("enable_cpu_backup=True", "enable_cpu_backup=False", Verdict.AFFECTED),
        ("_memory_saver_adapter.cuda_graph", "_memory_saver_adapter.graph", Verdict.UNKNOWN),
    ],
)
def test_a_copy_is_looked_for_where_graphs_are_captured(
    release_root: Callable[[str], pathlib.Path], old: str, new: str, verdict: Verdict
) -> None:
    assert fix.probe(Source(rewritten(release_root(NEWEST), BACKEND, old, new))).verdict is verdict
