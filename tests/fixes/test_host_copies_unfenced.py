# SPDX-License-Identifier: Apache-2.0
"""HiCache's copies beside the steps of an overlapped scheduler: red, green, without overlap, and releases that wait."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import host_copies_unfenced as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = declared_in(fix).id
# steps beside a copy, and its slots that they write
BESIDE, BEHIND = [1, 1], [0, 0]


def run(release: str, **environment: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.host_copies", environment=environment)


@pytest.mark.parametrize("release", ["0.5.11", "0.5.14", "0.5.15.post1", "0.5.17", "0.5.18"])
def test_copies_both_ways_wait_for_the_step_that_runs(release: str) -> None:
    found = run(release)
    assert found["applied"] == [FIX]
    assert found["without"] == {"to the host": BESIDE, "from the host": BESIDE}
    assert found["with"] == {"to the host": BEHIND, "from the host": BEHIND}


@pytest.mark.parametrize("release", ["0.5.13", "0.5.19", "0.5.22"])
def test_copies_to_the_host_wait_where_others_do_by_themselves(release: str) -> None:
    found = run(release)
    assert found["applied"] == [FIX]
    assert found["without"] == {"to the host": BESIDE, "from the host": BEHIND}
    assert found["with"] == {"to the host": BEHIND, "from the host": BEHIND}


def test_the_controller_of_hybrid_models_waits_too() -> None:
    found = run("0.5.17", SGLANG_ENABLE_UNIFIED_RADIX_TREE="1")
    assert found["without"] == {"to the host": BESIDE, "from the host": BESIDE}
    assert found["with"] == {"to the host": BEHIND, "from the host": BEHIND}


def test_the_newest_release_waits_and_is_left_as_it_is() -> None:
    found = run(NEWEST)
    assert found == {"applied": [], "without": {"to the host": BEHIND, "from the host": BEHIND}}


class Stream:
    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.waits.append(stream)


class Controller:
    def __init__(self) -> None:
        self.write_queue, self.load_queue = ["asked"], ["asked"]
        self.write_stream, self.load_stream = Stream(), Stream()


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    fix._steps.pop(made, None)


def scheduler(cache: Any, overlap: bool = True) -> Any:
    return SimpleNamespace(tree_cache=cache, enable_overlap=overlap, forward_stream="steps")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_waits_for_the_steps_of_its_scheduler(controller: Controller, wrapped: bool) -> None:
    cache = SimpleNamespace(cache_controller=controller)
    fix.note_steps(scheduler(SimpleNamespace(inner=cache) if wrapped else cache))
    fix.write_behind_steps(controller)
    fix.load_behind_steps(controller)
    assert controller.write_stream.waits == controller.load_stream.waits == ["steps"]


def test_nothing_waits_where_nothing_is_copied(controller: Controller) -> None:
    fix.note_steps(scheduler(SimpleNamespace(cache_controller=controller)))
    controller.write_queue, controller.load_queue = [], []
    fix.write_behind_steps(controller)
    fix.load_behind_steps(controller)
    assert controller.write_stream.waits == controller.load_stream.waits == []


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_waits_without_overlap_or_a_controller(controller: Controller, overlap: bool) -> None:
    fix.note_steps(scheduler(SimpleNamespace(cache_controller=None if overlap else controller), overlap))
    fix.write_behind_steps(controller)
    fix.load_behind_steps(controller)
    assert controller.write_stream.waits == controller.load_stream.waits == []


def test_copies_that_are_submitted_in_another_way_are_not_judged() -> None:
    change = (
        "sglang/srt/mem_cache/hybrid_cache/hybrid_cache_controller.py",
        "            start_event.wait(self.write_stream)\n",
        "            start_event.wait(self.copy_stream)\n",
    )
    assert alone.verdict(FIX, "0.5.17", *change) is Verdict.UNKNOWN
