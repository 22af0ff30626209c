# SPDX-License-Identifier: Apache-2.0
"""The lines of `bcg-fixes status`: short where nothing is wrong, and equal ranks once."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.cli import ranks, status
from sglang_bcg_fixes.model import OURS
from sglang_bcg_fixes.planning import registry

IDS = sorted(fix.id for fix in registry.discover().fixes)


def fix(name: str, state: str, **further: Any) -> dict[str, Any]:
    return {"id": name, "state": state, "detail": f"why {name}", "owner": OURS, "calls": {"a": 3}, **further}


def process(pid: int, title: str, state: str = "applied", **changed: str) -> dict[str, Any]:
    """Half of the fixes have this state, the others are not needed, `changed` have others."""
    fixes = [fix(name, changed.get(name, "not needed" if number % 2 else state)) for number, name in enumerate(IDS)]
    kernels = {"gdn_extend": {"id": "gdn_extend", "impl": "cuda", "state": "applied", "detail": "chosen", "calls": {}}}
    return {
        "pid": pid,
        "title": title,
        "process": f"Process-{pid} (pid {pid})",
        "server": 1,
        "sglang": "0.5.23",
        "plan": "1f0c",
        "read_back": {"line": "read back when it was built", "time": 1.0 * pid, "batches": 0},
        "batches": pid,
        "selfcheck": {"verdict": "right", "reason": "7 batches", "seconds": 1.0 * pid},
        "fixes": fixes,
        "kernels": kernels,
    }


def shown(contents: list[dict[str, Any]], each: bool = False) -> list[str]:
    found = [(content, []) for content in contents] if each else ranks.folded(contents)
    return [line for content, others in found for line in status.lines(content, others, each)]


def test_a_server_of_eight_ranks_takes_at_most_25_lines() -> None:
    schedulers = [process(10 + rank, f"scheduler_TP{rank}") for rank in range(8)]
    lines = shown([process(1, "", "waiting"), *schedulers, process(30, "detokenizer", "waiting")])
    assert len(lines) <= 25, lines
    (title,) = (line for line in lines if "and the same in" in line)
    assert title.startswith("scheduler_TP0, Process-10 (pid 10), and the same in scheduler_TP1 (pid 11), ")
    assert "scheduler_TP7 (pid 17)  sglang" in title
    (applied,) = (line for line in lines if line.startswith("    applied") and "gdn_extend" not in line)
    assert all(f"{name} (3 calls)" in applied for name in IDS[::2]) and applied.split()[1] == f"{len(IDS[::2])}:"
    assert lines.count(f"    not needed  {len(IDS) // 2}") == 3


@pytest.mark.parametrize("state", ["lost", "failed", "unknown", "off", "blocked"])
def test_what_is_not_as_it_should_be_has_its_line_and_why(state: str) -> None:
    lines = shown([process(10, "scheduler_TP0"), process(11, "scheduler_TP1", **{IDS[0]: state})])
    assert f"    {state:11} {IDS[0]}: why {IDS[0]}" in lines
    # a rank that differs is not one of the equal ones
    assert not any("and the same in" in line for line in lines)


def test_a_fix_of_another_package_has_its_line() -> None:
    content = process(10, "scheduler_TP0")
    content["fixes"][0]["owner"] = "theirs"
    lines = shown([content])
    assert f"    applied     {IDS[0]} (3 calls): why {IDS[0]}" in lines and f"    {'':11} package theirs" in lines


def test_every_fix_and_rank_can_be_asked_for() -> None:
    contents = [process(10, "scheduler_TP0"), process(11, "scheduler_TP1")]
    lines = shown(contents, each=True)
    for state, name in zip(["applied", "not needed"], IDS[:2], strict=True):
        calls = " (3 calls)" if state == "applied" else ""
        assert lines.count(f"    {state:11} {name}{calls}: why {name}") == 2
    assert sum(line.startswith("scheduler_TP") for line in lines) == 2


def test_processes_that_are_no_ranks_are_not_put_together() -> None:
    lines = shown([process(1, "detokenizer"), process(2, "detokenizer")])
    assert not any("and the same in" in line for line in lines)
