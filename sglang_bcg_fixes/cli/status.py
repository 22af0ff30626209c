# SPDX-License-Identifier: Apache-2.0
"""The lines of `bcg-fixes status`: one for each server, what is not as it should be, and every process if asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes.cli import ranks
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.model import OURS, Action
from sglang_bcg_fixes.process import report, watch
from sglang_bcg_fixes.process.selfcheck.check import WRONG as CHECKED_WRONG

# of the JSON: 1 was a list of processes, with "read_back", "waiting" and "unknown"
FORMAT = 2
OK, CHECK, WRONG = "OK", "CHECK", "WRONG"
# a fix in such a state makes answers wrong, or may
BROKEN, DOUBTFUL = (report.LOST, report.FAILED), (report.UNREAD, Action.BLOCKED.value)
WANTED = (report.APPLIED, *BROKEN, *DOUBTFUL)
NOTHING = "not verified yet: no graph runner has been built, and no batch has come"


def with_calls(content: dict[str, Any]) -> dict[str, Any]:
    """The report with the batches since it was verified, and the calls of each applied fix by place."""
    # a server of an earlier version of this package may be running
    calls = call_counts.calls(content) if content.get("reached") else None
    found, last = calls or {}, content.get("verified")

    def since(name: str, before: str) -> int | None:
        return sum(found.get(name, {}).values()) - last.get(before, 0) if calls is not None and last else None

    return {
        **content,
        "batches": since(watch.BATCHES, "batches"),
        "replays": since(watch.REPLAYED, "replayed"),
        "fallbacks": since(watch.REFUSED, "refused"),
        "fixes": [counted(row, found.get(row["id"])) for row in content["fixes"]],
        "kernels": {op: counted(row, found.get(op)) for op, row in content["kernels"].items()},
    }


def counted(row: dict[str, Any], calls: dict[str, int] | None) -> dict[str, Any]:
    return {**row, "calls": calls if row["state"] == report.APPLIED else None}


def servers(live: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The processes of each server; those that run no model have what concerns it from those that do."""
    found: dict[int, list[dict[str, Any]]] = {}
    for content in live:
        found.setdefault(content["server"], []).append(content)
    return [[informed(content, server) for content in server] for server in found.values()]


def informed(content: dict[str, Any], server: Sequence[dict[str, Any]]) -> dict[str, Any]:
    knowing = [each for each in server if each.get("model")]
    if content in knowing or not knowing:
        return content
    concerned = {row["id"] for each in knowing for row in each["fixes"] if row.get("concerns")}
    return {**content, "fixes": [{**row, "concerns": row["id"] in concerned} for row in content["fixes"]]}


def as_dict(live: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = [
        {"server": server[0]["server"], "verdict": verdict(server), "differences": ranks.differences(server)}
        for server in servers(live)
    ]
    return {"format": FORMAT, "servers": found, "processes": list(live)}


def lines_of(server: Sequence[dict[str, Any]], everything: bool) -> Iterator[str]:
    """One line for a server, and one for all that is not as it should be; then every process, where that is asked."""
    yield f"{verdict(server):5}  {summary(server)}"
    yield from dict.fromkeys(exceptions(server))
    yield from (f"RANKS DIFFER: {difference}" for difference in ranks.differences(server))
    for content in server if everything else ():
        yield from lines(content)


def verdict(server: Sequence[dict[str, Any]]) -> str:
    states = [(row["state"], row) for content in server for row in missing(content)]
    checks = [(content.get("selfcheck") or {}).get("verdict") for content in server]
    if CHECKED_WRONG in checks or any(state in BROKEN and "impl" not in row for state, row in states):
        return WRONG
    is_doubtful = states or absent(server) or ranks.differences(server)
    return CHECK if is_doubtful or not all(map(is_known, workers(server))) else OK


def absent(server: Sequence[dict[str, Any]]) -> str:
    """Say how many ranks report if not all of them do; an earlier version of this package does not count them."""
    there = [content for content in server if ranks.is_rank(content)]
    wanted = max((content.get("ranks") or 0 for content in there), default=0)
    return f"{len(there)} of {wanted} ranks report" if len(there) < wanted else ""


def workers(server: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes that run the model: those that know it, or at least the schedulers, or what there is."""
    schedulers = [content for content in server if ranks.is_rank(content)]
    return schedulers or [content for content in server if content.get("model")] or list(server)


def is_known(content: Mapping[str, Any]) -> bool:
    """Tell whether a process knows its model and has verified its fixes, if there is anything to verify."""
    looks = any(row["state"] in (*WANTED, report.PENDING) for row in content["fixes"])
    return bool(content.get("model") and content.get("verified")) or not looks


def summary(server: Sequence[dict[str, Any]]) -> str:
    """The model, the port, the ranks, the fixes that concern the model, and what is counted."""
    working = workers(server)
    first = next((content for content in working if content.get("model")), working[0])
    where = f" :{first['port']}" if first.get("port") else ""
    model = first.get("model") or f"{'a server' if is_known(first) else 'no model yet'} (pid {first['server']})"
    count = len(working)
    alike = "differ" if ranks.differences(server) else "alike"
    many = f" ({count} ranks {alike})" if count > 1 else ""
    wanted = [row for row in first["fixes"] if is_wanted(row)]
    live = sum(row["state"] == report.APPLIED for row in wanted) if first.get("verified") else 0
    off = sum(bool(row.get("switched_off") and row.get("concerns")) for row in first["fixes"])
    is_none = not wanted and not off and first.get("verified") and first.get("model")
    parts = ["none of the fixes needed" if is_none else f"{live} of {len(wanted)} fixes live"]
    parts += [f"{off} switched off"] if off else []
    check = first.get("selfcheck")
    parts.append(f"self-check {check.get('short', check['verdict'])}" if check else "no self-check")
    for what in ("replays", "fallbacks"):
        counts = [content[what] for content in working if content.get(what) is not None]
        parts += [f"{max(counts):,} {what}"] if counts else []
    return f"{model}{where}{many}  {', '.join(parts)}"


def is_wanted(row: Mapping[str, Any]) -> bool:
    """Tell whether a fix is to be live in a server of this model; one that is lost was, and counts in any."""
    return row["state"] == report.LOST or (row["state"] in WANTED and bool(row.get("concerns")))


def missing(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fixes that are wanted and not there, and kernels that were asked for, or lost, and do not run."""
    yield from (row for row in content["fixes"] if is_wanted(row) and row["state"] != report.APPLIED)
    for op, row in content["kernels"].items():
        asked = row.get("required") and (row["state"] not in (report.APPLIED, report.PENDING) or row.get("left"))
        if asked or row["state"] == report.LOST:
            yield {"id": op, **row}


def exceptions(server: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each, once where several processes have the same."""
    if few := absent(server):
        yield f"    {'missing':11} {few}: the others start, have not loaded the plugin, or could not write their report"
    for content in server:
        if content.get("model") and not is_known(content):
            yield f"    {'unverified':11} the fixes could not be verified: see the server's log"
        check = content.get("selfcheck") or {}
        if check.get("verdict") == CHECKED_WRONG:
            yield f"    {WRONG:11} self-check: {check['reason']}"
        for row in missing(content):
            why = "; ".join(row.get("left") or ()) if row["state"] == report.APPLIED else row["detail"]
            state = "not running" if row["state"] == report.APPLIED else row["state"]
            yield f"    {state:11} {row['id']}: {why}"


def lines(content: dict[str, Any]) -> Iterator[str]:
    """Show one process: a line for each fix and kernel, with the reason."""
    title = f"{content['title']}, " if content["title"] else ""
    yield f"{title}{content['process']}  sglang {content['sglang']}  plan {content['plan']}"
    yield f"    {verified_words(content)}"
    yield f"    {selfcheck_words(content)}"
    for row in report.rows(content):
        name = ", ".join(filter(None, (row["id"], row.get("impl"))))
        yield f"    {row['state']:11} {name}{calls_words(content, row)}: {row['detail']}"
        yield from (f"    {'':11} {words}" for words in further_words(row))


def verified_words(content: dict[str, Any]) -> str:
    last = content.get("verified")
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
    """Name the package of what is not ours, and why a kernel or one of its implementations does not run."""
    # a server of an earlier version of this package does not say whose it is
    if row.get("owner", OURS) != OURS:
        yield f"package {row['owner']}"
    for name, reason in row.get("rejected", {}).items():
        # nothing is said twice
        if reason not in row["detail"]:
            yield f"not {name}: {reason}"
    yield from (f"left to SGLang's own code: {reason}" for reason in row.get("left", ()))
    yield from (f"left to Triton: {what}" for what in row.get("to_triton", ()))
