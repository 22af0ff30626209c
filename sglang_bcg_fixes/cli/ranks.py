# SPDX-License-Identifier: Apache-2.0
"""The processes of each server, and the differences between the fixes of its ranks.

Ranks that run different code give different answers to the same collective, or hang in it. A process belongs to the
outermost of its ancestors that reports, and SGLang gives its schedulers titles, such as `sglang::scheduler_TP0`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes.process import procfs, report
from sglang_bcg_fixes.process.this_server import SCHEDULER


def server_of(pid: int, reporting: Container[int]) -> int:
    """The outermost of the process and its ancestors that report."""
    server, ancestor = pid, pid
    while ancestor := procfs.parent(ancestor):
        server = ancestor if ancestor in reporting else server
    return server


def with_ranks(contents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The reports with each process's title, and the process that its server began with."""
    pids = {content["pid"] for content in contents}
    found = [
        {**content, "title": procfs.title(content["pid"]), "server": server_of(content["pid"], pids)}
        for content in contents
    ]
    return sorted(found, key=lambda content: (content["server"], content["title"] or "", content["pid"]))


def differences(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the differences between the schedulers of one server."""
    found = []
    for server in dict.fromkeys(content["server"] for content in contents):
        ranks = [each for each in contents if each["server"] == server and is_rank(each)]
        for rank in ranks[1:]:
            found += [f"{name(rank)} {has}, and {name(ranks[0])} {other}" for has, other in compared(rank, ranks[0])]
    return found


def is_rank(content: Mapping[str, Any]) -> bool:
    return (content["title"] or "").startswith(SCHEDULER)


def is_loaded(content: Mapping[str, Any]) -> bool:
    """Tell whether SGLang has imported what is patched; without patches nothing is verified."""
    there = {row["state"] for row in report.rows(content)}
    return bool(content.get("verified")) or not {report.APPLIED, report.PENDING} & there


def name(content: Mapping[str, Any]) -> str:
    return f"{content['title']} (pid {content['pid']})"


def compared(rank: Mapping[str, Any], first: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the differences of two ranks, in words for each."""
    found = []
    if rank["plan"] != first["plan"]:
        found.append((f"plans {rank['plan']}", f"plans {first['plan']}"))
    if not is_loaded(rank) or not is_loaded(first):
        return found
    of_rank, of_first = states(rank), states(first)
    for each in sorted(of_rank.keys() | of_first.keys()):
        if of_rank.get(each) != of_first.get(each):
            found.append((f"has {each} {of_rank.get(each)}", f"has it {of_first.get(each)}"))
    return found


def states(content: Mapping[str, Any]) -> dict[str, str]:
    return {row["id"]: " ".join(filter(None, (row.get("impl"), row["state"]))) for row in report.rows(content)}
