# SPDX-License-Identifier: Apache-2.0
"""Graphs whose memory a memory saver has released, in a release's own capture and adapter."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "graph_memory_not_saved"
BACKEND = "sglang/srt/model_executor/runner_backend/full_cuda_graph_backend.py"
RIGHT = [[30.0, 60.0]] * 2
RIGHT_BY_ITSELF = "0.5.21"


# 0.5.14 is the first with a backend for these graphs, 0.5.20 the last without a copy, and 0.5.21 right by itself
@pytest.mark.parametrize("release", ["0.5.11", "0.5.13", "0.5.14", "0.5.17", "0.5.20", RIGHT_BY_ITSELF])
def test_a_replay_after_sleep_answers_as_before(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.released_graph_memory")
    if release == RIGHT_BY_ITSELF:
        assert found == {"applied": [], "without": RIGHT}
        return
    assert found["applied"] == [FIX]
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
def test_a_copy_is_looked_for_where_graphs_are_captured(old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict(FIX, NEWEST, BACKEND, old, new) is verdict
