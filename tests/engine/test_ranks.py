# SPDX-License-Identifier: Apache-2.0
"""Schedulers of one server, and of two, as `bcg-fixes status` compares them."""

from __future__ import annotations

import json

import pytest

from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import Extra

extra = test_plugin.extra


def test_ranks_that_have_the_same_are_no_news(extra: Extra) -> None:
    extra().scenario("server_ranks", "same_ranks")


@pytest.mark.parametrize(
    ("steps", "environ", "words", "verdict"),
    [
        (
            ["build", "batch"],
            {"SGLANG_BCG_FIX_EXTRA_FIX": "off"},
            ["plans ", "scheduler_TP1 (pid RANK) has extra_fix off, and scheduler_TP0 (pid FIRST) has it applied"],
            "CHECK",
        ),
        (
            ["lose", "build", "batch"],
            {},
            ["scheduler_TP1 (pid RANK) has extra_fix lost, and scheduler_TP0 (pid FIRST) has it applied"],
            "WRONG",
        ),
    ],
    ids=["another plan", "lost in one"],
)
def test_a_rank_that_differs_is_said_aloud(
    extra: Extra, steps: list[str], environ: dict[str, str], words: list[str], verdict: str
) -> None:
    arguments = (json.dumps(steps), json.dumps(environ))
    done = extra().scenario("server_ranks", "different_rank", *arguments)
    text, machine, rank, first = processes.result(done)
    told = [line.removeprefix("RANKS DIFFER: ") for line in text.splitlines() if line.startswith("RANKS DIFFER: ")]
    assert len(told) == len(words), text
    for line, expected in zip(told, words, strict=True):
        assert expected.replace("RANK", rank).replace("FIRST", first) in line, told
    assert machine["differences"] == told and machine["verdict"] == verdict
    assert text.startswith(f"{verdict:5}  unknown model (2 ranks differ)  "), text


def test_a_rank_that_still_loads_is_not_compared(extra: Extra) -> None:
    extra().scenario("server_ranks", "rank_that_still_loads")


def test_two_servers_may_have_different_fixes(extra: Extra) -> None:
    extra().scenario("server_ranks", "two_servers")
