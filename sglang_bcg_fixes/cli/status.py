# SPDX-License-Identifier: Apache-2.0
"""Additions of `bcg-fixes status` to a process's report: the counters at this moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.model import OURS
from sglang_bcg_fixes.process import report, watch

NOTHING = "not read back yet: no graph runner has been built, and no batch has come"


def with_calls(content: dict[str, Any]) -> dict[str, Any]:
    """The report with the batches since it was read back, and the calls of each applied fix by place."""
    # a server of an earlier version of this package may be running
    calls = call_counts.calls(content) if content.get("reached") else None
    found, last = calls or {}, content.get("read_back")
    batches = sum(found.get(watch.BATCHES, {}).values()) - (last["batches"] if last else 0)
    return {
        **content,
        "batches": batches if calls and last else None,
        "fixes": [counted(row, found.get(row["id"])) for row in content["fixes"]],
        "kernels": {op: counted(row, found.get(op)) for op, row in content["kernels"].items()},
    }


def counted(row: dict[str, Any], calls: dict[str, int] | None) -> dict[str, Any]:
    return {**row, "calls": calls if row["state"] == report.APPLIED else None}


def read_back_words(content: dict[str, Any]) -> str:
    last = content.get("read_back")
    if not last:
        return NOTHING
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    batches = "" if content["batches"] is None else f"; {content['batches']} batches since"
    return f"{when} {last['line']}{batches}"


def selfcheck_words(content: dict[str, Any]) -> str:
    found, canary = content.get("selfcheck"), content.get("canary")
    words = f"self-check: {found['verdict']}: {found['reason']}" if found else "self-check: none in this process"
    return words + (f"; {canary['compared']} prefills compared since" if canary else "")


def calls_words(content: dict[str, Any], row: dict[str, Any]) -> str:
    if row["state"] != report.APPLIED:
        return ""
    if row["calls"] is None:
        return " (calls unknown)"
    total = sum(row["calls"].values())
    if total:
        return f" ({total} calls)"
    batches = content["batches"]
    return f" (never reached in {batches} batches)" if batches else " (not reached yet)"


def further_words(row: dict[str, Any]) -> Iterator[str]:
    """Name the package of what is not ours, and the forms of a kernel that do not run, with the reasons."""
    # a server of an earlier version of this package does not say whose it is
    if row.get("owner", OURS) != OURS:
        yield f"package {row['owner']}"
    for name, reason in row.get("rejected", {}).items():
        yield f"not {name}: {reason}"
