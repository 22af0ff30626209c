# SPDX-License-Identifier: Apache-2.0
"""Weights that are reloaded from disk under the prefill graphs of a real runner, loader and capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import reload_keeps_prefill_graphs as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

REPLAYED, EAGER, STALE = (["replayed, right"] * 2, ["eager, right"] * 2, ["replayed, wrong"] * 2)
RUNNER, UPDATER = (
    f"sglang/srt/model_executor/{name}.py" for name in ("model_runner", "model_runner_components/weight_updater")
)
FAILED = "a checkpoint that is not there"
REFUSED = "graphs that a self-check refused"


def outcome(runner: str, answers: list[str], updated: bool = True) -> dict[str, Any]:
    return {
        "updated": updated,
        "runner": runner,
        "old graphs freed": runner != "old",
        "cache kept": True,
        "answers": answers,
    }


# 0.5.15 is the first that makes prefill graphs by default, and each of those before it keeps them elsewhere
@pytest.mark.parametrize("release", ["0.5.11", "0.5.13", "0.5.14", "0.5.15", "0.5.16", "0.5.19", NEWEST])
def test_prefill_graphs_have_the_weights_that_were_loaded(release: str) -> None:
    found, log = alone.logged("reload_keeps_prefill_graphs", release, "tests.scenarios.reloaded_weights")
    assert found["applied"] == ["reload_keeps_prefill_graphs"]
    untouched = {
        "at start": REPLAYED,
        # SGLang's graphs are right, and the same ones
        "weights in place": [True, *REPLAYED],
        FAILED: outcome("old", REPLAYED, updated=False),
        REFUSED: outcome("old", EAGER),
    }
    assert found["with"] == untouched | {
        "first reload": outcome("new", REPLAYED),
        "second reload": outcome("new", REPLAYED),
        "a draft": outcome("none", EAGER),
        "no memory": outcome("none", EAGER),
    }
    stock = found["without"]
    assert {name: stock[name] for name in untouched} == untouched
    for name in ("first reload", "second reload", "a draft", "no memory"):
        assert (stock[name]["runner"], stock[name]["answers"]) == ("old", STALE)
    assert log.count("the prefill graphs could not be captured") == 1
    assert log.count("the draft model has new weights") == 1
    assert "RuntimeError: out of memory" in log
    assert log.count("SGLANG_BCG_FIX_RELOAD_KEEPS_PREFILL_GRAPHS=off keeps") == 2


def test_the_old_graphs_are_there_while_the_new_ones_are_captured() -> None:
    """Torch refuses to capture into a pool that no graph uses any longer."""
    graphs = {"old": object()}
    owner = type(fix.OWNERS[0], (), {"graphs": graphs, "output_buffers": {}, "buffers": SimpleNamespace()})()
    there: list[bool] = []
    runner = SimpleNamespace(
        prefill_cuda_graph_runner=owner,
        is_draft_worker=False,
        init_prefill_cuda_graph=lambda: there.append("old" in graphs),
    )
    fix.replace_graphs(runner)
    assert there == [True] and graphs == {}


@pytest.mark.parametrize(
    ("path", "old", "new", "verdict"),
    [
        (RUNNER, "graph=self.recapture_decode_cuda_graph", "graph=self.init_cuda_graphs", Verdict.FIXED),
        (
            RUNNER,
            "    def recapture_decode_cuda_graph(self):\n",
            "    def recapture_decode_cuda_graph(self):\n        self.init_prefill_cuda_graph()\n",
            Verdict.FIXED,
        ),
        (UPDATER, "recapture_cuda_graph: bool = False,\n    ) -> tuple", ") -> tuple", Verdict.ABSENT),
        (UPDATER, "self.recapture_cuda_graph()", "self.something_else()", Verdict.UNKNOWN),
    ],
)
def test_a_later_source_is_read_and_not_guessed(path: str, old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict("reload_keeps_prefill_graphs", NEWEST, path, old, new) is verdict
