# SPDX-License-Identifier: Apache-2.0
"""Rows of benchmarks/gdn_sanitizer.py, with a program in place of compute-sanitizer."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import gdn_sanitizer

WATCHED = gdn_sanitizer.Watched("memcheck", gdn_sanitizer.OURS, "random")
RIGHT = "qwen3_next_tp8: 3 steps, 0 faults\n========= ERROR SUMMARY: 0 errors\n"
RACES = """========= Error: Race reported between Write access at bcg::shared_pair(int)+0x10 in gdn_extend.cuh:222
=========     and Read access at bcg_gdn_advance_bf16+0x20 [4 hazards]
========= Error: Race reported between Write access at bcg::shared_pair(int)+0x30 in gdn_extend.cuh:222
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("said", "status", "verdict"), [(RIGHT, 0, "green"), (RIGHT, 1, "red"), (RACES, 0, "red"), ("killed", 0, "red")]
)
def test_only_a_tool_that_ends_and_finds_nothing_is_green(
    said: str, status: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gdn_sanitizer, "PROGRAM", str(program))
    row = gdn_sanitizer.run(WATCHED, 60)
    assert row["verdict"] == verdict, row
    assert row["steps_said"] == ("3 steps, 0 faults" if said == RIGHT else None)


def test_one_that_does_not_end_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "sanitizer"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(gdn_sanitizer, "PROGRAM", str(program))
    assert gdn_sanitizer.run(WATCHED, 0.2)["why"] == "not done within 0 s"


def test_reports_of_one_line_of_the_source_are_counted_together() -> None:
    assert gdn_sanitizer.reports(RACES) == {
        "Error: Race reported between Write access at bcg::shared_pair(int) in gdn_extend.cuh:222": 2,
        "and Read access at bcg_gdn_advance_bf16": 1,
    }
