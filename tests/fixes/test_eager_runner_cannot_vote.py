# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention, where prefill graphs could not be captured and where they could."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone, settings
from tests.wheels import NEWEST

FIX = "eager_runner_cannot_vote"
EAGER, REPLAYED = [["EagerRunner", False, True]] * 2, [["PrefillCudaGraphRunner", True, True]] * 2
ENDED = ["AttributeError: 'EagerRunner' object has no attribute 'can_replay_locally'"] * 2
RIGHT = {"LoRA": EAGER, "sizes too large": EAGER, "graphs": REPLAYED}
VOTE = "sglang/srt/managers/scheduler_components/dp_attn.py"
GUARD = """    if not isinstance(prefill_graph_runner, PrefillCudaGraphRunner):
        return False
"""


def run(release: str, *servers: str) -> Any:
    # without the other one no server starts whose sizes are too large
    return alone.found(FIX, release, "tests.scenarios.prefill_vote", *servers, **settings.only("no_bucket_fits"))


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.19", "0.5.20"])
def test_ranks_without_graphs_prefill_eagerly(release: str) -> None:
    found = run(release, *RIGHT)
    assert found["applied"] == [FIX, "no_bucket_fits"]
    assert found["with"] == RIGHT
    assert found["without"] == {"LoRA": ENDED, "sizes too large": ENDED, "graphs": REPLAYED}


def test_the_newest_release_is_left_as_it_is() -> None:
    # of its LoRA backends with data parallel attention, none is in plain torch
    servers = ("sizes too large", "graphs")
    assert run(NEWEST, *servers) == {"applied": ["no_bucket_fits"], "with": {name: RIGHT[name] for name in servers}}


def test_a_release_whose_vote_asks_every_runner_again_is_affected() -> None:
    assert alone.verdict(FIX, NEWEST, VOTE, GUARD, "") is Verdict.AFFECTED


def test_an_eager_runner_that_can_be_asked_is_right() -> None:
    runner = "sglang/srt/model_executor/runner/eager_runner.py"
    answer = "    def can_replay_locally(self, **batch):\n        return False\n\n    def can_run_graph("
    assert alone.verdict(FIX, "0.5.20", runner, "    def can_run_graph(", answer) is Verdict.FIXED
