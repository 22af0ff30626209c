# SPDX-License-Identifier: Apache-2.0
"""Processes that are ranks of one server: collectives in a replay, ranks that wait for each other, one that ends."""

from __future__ import annotations

from typing import Any

from tests import processes


def found(*arguments: str) -> Any:
    return processes.result(processes.python("-m", "tests.scenarios.forked_ranks", *arguments, timeout=120))


def test_a_replay_sums_over_the_ranks_what_they_have_then() -> None:
    assert found("sums") == [[112.0, 111.0, 111.0, 111.0]] * 3


def test_ranks_that_wait_for_each_other_fail_with_the_stack_of_each() -> None:
    told = found("one_alone", "20")
    assert told.startswith("not every rank has answered within 20 s\nrank 0: still running ")
    first, second = told.split("rank 1: ")
    assert "replay_alone" in first and "replay_alone" not in second
    assert "in barrier" in second


def test_a_rank_that_ends_gives_its_exception_and_so_does_the_one_that_waits() -> None:
    waiting, ended = found("ended")
    assert ended == "ValueError: a defect"
    assert waiting.startswith("RuntimeError: ")
