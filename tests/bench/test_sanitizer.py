# SPDX-License-Identifier: Apache-2.0
"""Rows of benchmarks/sanitizer.py, with a program in place of compute-sanitizer."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import sanitizer

WATCHED = sanitizer.Watched(sanitizer.GDN, "memcheck", "bcg_gdn", "random")
RIGHT = "qwen3_next_tp8: 3 steps, 0 faults\n========= ERROR SUMMARY: 0 errors\n"
RACES = """========= Error: Race reported between Write access at bcg::shared_pair(int)+0x10 in gdn_extend.cuh:222
=========     and Read access at bcg_gdn_advance_bf16+0x20 [4 hazards]
========= Error: Race reported between Write access at bcg::shared_pair(int)+0x30 in gdn_extend.cuh:222
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("said", "status", "verdict"),
    [(RIGHT, 0, "green"), (RIGHT, 1, "red"), (RACES, 0, "red"), ("killed", 0, "red")],
    ids=["nothing", "a wrong step", "races", "killed"],
)
def test_only_a_tool_that_ends_and_finds_nothing_is_green(
    said: str, status: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitizer, "PROGRAM", str(program))
    row = sanitizer.run(WATCHED, 60)
    assert row["verdict"] == verdict, row
    assert row["steps_said"] == ("3 steps, 0 faults" if said == RIGHT else "")


def test_one_that_does_not_end_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "sanitizer"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitizer, "PROGRAM", str(program))
    assert sanitizer.run(WATCHED, 0.2)["why"] == "not done within 0 s"


def test_reports_of_one_line_of_the_source_are_counted_together() -> None:
    assert sanitizer.reports(RACES) == {
        "Error: Race reported between Write access at bcg::shared_pair(int) in gdn_extend.cuh:222": 2,
        "and Read access at bcg_gdn_advance_bf16": 1,
    }


@pytest.mark.parametrize("benchmark", sanitizer.STEPS)
def test_every_step_is_watched_by_every_tool_on_the_cuda_implementation(benchmark: str) -> None:
    every = sanitizer.watched(benchmark)
    found = {(each.tool, each.steps) for each in every}
    tools = ("memcheck", "synccheck", "racecheck", "initcheck")
    assert found == {(tool, steps) for tool in tools for steps in sanitizer.STEPS[benchmark]}
    for each in every:
        command = each.command()
        assert "cuda" in command and command.count(f"{sanitizer.HERE / benchmark}.py") == 1
        assert (f"kns={each.kernels}" in command) == bool(each.kernels) == (each.tool != "initcheck")
