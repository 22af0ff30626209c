# SPDX-License-Identifier: Apache-2.0
"""The lines of `bcg-fixes status`: the report of a process, and its counters at this moment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_bcg_fixes.cli import ranks
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.model import OURS, Action
from sglang_bcg_fixes.process import report, watch

# these share a line for all fixes of this package, unless each is asked for
TOGETHER = (report.APPLIED, report.WAITING)
NOT_NEEDED = Action.NOT_NEEDED.value
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


def lines(content: dict[str, Any], others: Sequence[dict[str, Any]], each: bool) -> Iterator[str]:
    """Show a process, and name `others` that have the same; a line for each fix only where that is asked for."""
    title = f"{content['title']}, " if content["title"] else ""
    also = f", and the same in {', '.join(map(ranks.name, others))}" if others else ""
    yield f"{title}{content['process']}{also}  sglang {content['sglang']}  plan {content['plan']}"
    yield f"    {read_back_words(content)}"
    yield f"    {selfcheck_words(content)}"
    rows = list(report.rows(content))
    together = [] if each else [row for row in rows if is_plain(row)]
    for state in TOGETHER:
        if names := [row["id"] + calls_words(content, row) for row in together if row["state"] == state]:
            yield f"    {state:11} {len(names)}: {', '.join(names)}"
    for row in (row for row in rows if each or not is_plain(row)):
        name = ", ".join(filter(None, (row["id"], row.get("impl"))))
        yield f"    {row['state']:11} {name}{calls_words(content, row)}: {row['detail']}"
        yield from (f"    {'':11} {words}" for words in further_words(row))
    if unneeded := sum(row["state"] == NOT_NEEDED for row in together):
        yield f"    {NOT_NEEDED:11} {unneeded}"


def is_plain(row: dict[str, Any]) -> bool:
    """Tell whether nothing has to be said of a fix but its name."""
    return "impl" not in row and row["state"] in (*TOGETHER, NOT_NEEDED) and not list(further_words(row))


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
    """Name the package of what is not ours, and why a kernel or one of its forms does not run."""
    # a server of an earlier version of this package does not say whose it is
    if row.get("owner", OURS) != OURS:
        yield f"package {row['owner']}"
    for name, reason in row.get("rejected", {}).items():
        yield f"not {name}: {reason}"
    yield from (f"left to SGLang's own code: {reason}" for reason in row.get("left", ()))
