# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention, where prefill graphs could not be captured and where they could."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import eager_runner_cannot_vote as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
EAGER, REPLAYED = [["EagerRunner", False, True]] * 2, [["PrefillCudaGraphRunner", True, True]] * 2
ENDED = ["AttributeError: 'EagerRunner' object has no attribute 'can_replay_locally'"] * 2
RIGHT = {"LoRA": EAGER, "sizes too large": EAGER, "graphs": REPLAYED}
# without it no server starts whose sizes are too large
SETTINGS = settings.only(FIX.id) | settings.only("no_bucket_fits")
VOTE = "sglang/srt/managers/scheduler_components/dp_attn.py"
GUARD = """    if not isinstance(prefill_graph_runner, PrefillCudaGraphRunner):
        return False
"""
Run = Callable[..., Any]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Run:
    def run(release: str, *servers: str) -> Any:
        root = release_root(release)
        return processes.beside(root, "-m", "tests.scenarios.prefill_vote", *servers, timeout=600, **SETTINGS)[0]

    return run


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.19", "0.5.20"])
def test_ranks_without_graphs_prefill_eagerly(run: Run, release: str) -> None:
    found = run(release, *RIGHT)
    assert found["applied"] == [FIX.id, "no_bucket_fits"]
    assert found["with"] == RIGHT
    assert found["without"] == {"LoRA": ENDED, "sizes too large": ENDED, "graphs": REPLAYED}


def test_the_newest_release_is_left_as_it_is(run: Run) -> None:
    # of its LoRA backends with data parallel attention, none is in plain torch
    servers = ("sizes too large", "graphs")
    assert run(NEWEST, *servers) == {"applied": ["no_bucket_fits"], "with": {name: RIGHT[name] for name in servers}}


def test_a_release_whose_vote_asks_every_runner_again_is_affected(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    changed = Source(rewritten(release_root(NEWEST), VOTE, GUARD, ""))
    assert fix.probe(changed).verdict is Verdict.AFFECTED


def test_an_eager_runner_that_can_be_asked_is_right(release_root: Callable[[str], pathlib.Path]) -> None:
    runner = "sglang/srt/model_executor/runner/eager_runner.py"
    answer = "    def can_replay_locally(self, **batch):\n        return False\n\n    def can_run_graph("
    changed = Source(rewritten(release_root("0.5.20"), runner, "    def can_run_graph(", answer))
    assert fix.probe(changed).verdict is Verdict.FIXED
