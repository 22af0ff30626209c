# SPDX-License-Identifier: Apache-2.0
"""Schedulers of one server, and of two, as `bcg-fixes status` compares them."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import Extra, scenario

extra = test_plugin.extra


def server(site: pathlib.Path, reports: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return scenario(site, reports, "server_ranks", *arguments)


def test_ranks_that_have_the_same_are_no_news(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = server(extra(), tmp_path / "reports", "same_ranks")
    assert done.returncode == 0, done.stderr


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
    extra: Extra, tmp_path: pathlib.Path, steps: list[str], environ: dict[str, str], words: list[str], verdict: str
) -> None:
    arguments = (json.dumps(steps), json.dumps(environ))
    done = server(extra(), tmp_path / "reports", "different_rank", *arguments)
    text, machine, rank, first = processes.result(done)
    told = [line.removeprefix("RANKS DIFFER: ") for line in text.splitlines() if line.startswith("RANKS DIFFER: ")]
    assert len(told) == len(words), text
    for line, expected in zip(told, words, strict=True):
        assert expected.replace("RANK", rank).replace("FIRST", first) in line, told
    assert machine["differences"] == told and machine["verdict"] == verdict
    assert text.startswith(f"{verdict:5}  unknown model (2 ranks differ)  "), text


def test_a_rank_that_still_loads_is_not_compared(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = server(extra(), tmp_path / "reports", "rank_that_still_loads")
    assert done.returncode == 0, done.stderr


def test_two_servers_may_have_different_fixes(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = server(extra(), tmp_path / "reports", "two_servers")
    assert done.returncode == 0, done.stderr
