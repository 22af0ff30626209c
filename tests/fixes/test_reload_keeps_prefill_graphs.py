# SPDX-License-Identifier: Apache-2.0
"""Weights that are reloaded from disk under the prefill graphs of a real runner, loader and capture."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.fixes import reload_keeps_prefill_graphs as fix
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.finding import Verdict
from tests import wheels
from tests.fixes import alone
from tests.wheels import NEWEST

REPLAYED, EAGER, STALE = (["replayed, right"] * 2, ["eager, right"] * 2, ["replayed, wrong"] * 2)
RUNNER, UPDATER = (
    f"sglang/srt/model_executor/{name}.py" for name in ("model_runner", "model_runner_components/weight_updater")
)
FAILED = "a checkpoint that is not there"
REFUSED = "graphs that a self-check refused"


def outcome(runner: str, answers: list[str], updated: bool = True, freed: bool = True) -> dict[str, Any]:
    return {
        "updated": updated,
        "runner": runner,
        "old graphs freed": freed,
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
        FAILED: outcome("old", REPLAYED, updated=False, freed=False),
        REFUSED: outcome("old", EAGER, freed=False),
    }
    assert found["with"] == untouched | {
        "first reload": outcome("new", REPLAYED),
        "second reload": outcome("new", REPLAYED),
        "a draft": outcome("none", EAGER, freed=False),
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


class Graph:
    """One that can be referred to weakly."""


class Runner:
    """A model runner whose captures note how many of the graphs before them have not ended."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.noted: list[tuple[str, int]] = []
        self.is_draft_worker = False
        self.failing = ""
        self.capture_decode()
        self.init_prefill_cuda_graph()

    def captured(self, kind: str, owner: str) -> Any:
        self.noted.append((kind, len(self.alive)))
        graphs = {size: Graph() for size in range(3)}
        self.alive.update(graphs.values())
        if kind == self.failing:
            raise RuntimeError("out of memory")
        return type(owner, (), {"graphs": graphs, "output_buffers": {}, "buffers": SimpleNamespace()})()

    def capture_decode(self) -> None:
        # in a cycle, as SGLang's
        owner = self.captured("decode", fix.DECODE_OWNER)
        self.decode_cuda_graph_runner = SimpleNamespace(backend=owner)
        owner.runner = self.decode_cuda_graph_runner

    def init_prefill_cuda_graph(self) -> None:
        self.prefill_cuda_graph_runner = self.captured("prefill", fix.OWNERS[0])

    def reload(self) -> None:
        self.noted.clear()
        fix.replace_graphs(self, self.capture_decode)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # of a record, pytest would keep the traceback, and with it the graphs
    monkeypatch.setattr(fix.logger, "exception", lambda *_: None)
    yield
    fix.kept_for_the_pool.clear()
    fix.never_ended.clear()


def test_all_graphs_but_one_of_a_kind_end_before_any_is_captured() -> None:
    """Torch refuses to capture into a pool that no graph uses; the end of a graph harms those of its stream."""
    runner = Runner()
    for _ in range(3):
        runner.reload()
        assert runner.noted == [("decode", 2), ("prefill", 5)]


def test_decode_graphs_that_are_new_by_now_stay() -> None:
    runner = Runner()
    new = dict(runner.decode_cuda_graph_runner.backend.graphs)
    fix.replace_graphs(runner)
    assert runner.decode_cuda_graph_runner.backend.graphs == new


def test_no_graph_of_a_draft_ends() -> None:
    runner = Runner()
    runner.is_draft_worker = True
    runner.reload()
    gc.collect()
    assert runner.prefill_cuda_graph_runner is None and runner.noted == [("decode", 6)] and len(runner.alive) == 9


def test_no_graph_of_a_capture_that_failed_ends() -> None:
    runner = Runner()
    runner.failing = "prefill"
    runner.reload()
    gc.collect()
    assert runner.prefill_cuda_graph_runner is None and len(runner.alive) == 2 + 3 + 3


def test_prefill_is_eager_where_decode_graphs_were_not_captured() -> None:
    runner = Runner()
    runner.failing = "decode"
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.reload()
    assert runner.prefill_cuda_graph_runner is None


@pytest.mark.parametrize(
    ("release", "disabled", "concerned"),
    [
        ("0.5.18", ["prefill"], False),
        ("0.5.19", ["prefill"], True),
        ("0.5.19", ["prefill", "decode"], False),
    ],
)
def test_decode_graphs_alone_are_concerned_where_all_share_a_stream(
    release: str, disabled: list[str], concerned: bool
) -> None:
    options = {f"--cuda-graph-backend-{phase}": ["disabled"] for phase in disabled}
    launch = Launch(releases.in_folder(wheels.unpacked(release)), {}, options)
    assert fix.FIX.concerns[0].touches(launch) is concerned


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
