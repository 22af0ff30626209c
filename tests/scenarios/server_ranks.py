# SPDX-License-Identifier: Apache-2.0
"""The main process of a server beside the fake SGLang, and the schedulers that it starts, as status shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import setproctitle

from sglang_bcg_fixes import plugin
from tests.scenarios import named
from tests.scenarios.fake_server import batch, begin, build, change

Process = subprocess.Popen[bytes]
READY = ("build", "batch")
STEPS: dict[str, Callable[[], Any]] = {"build": build, "batch": batch, "lose": lambda: change("replaced function")}


def rank(title: str, *steps: str) -> None:
    """A process that loads the plugin, does these steps, and ends when it is told to."""
    setproctitle.setproctitle(title)
    begin()
    for step in steps:
        STEPS[step]()
    print("ready", flush=True)
    input()


def start(*arguments: str, **environ: str) -> Process:
    """One of this module's functions in a process of its own; it is ready."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.scenarios.server_ranks", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environ},
    )
    assert started.stdout and started.stdout.readline() == b"ready\n"
    return started


def end(started: Sequence[Process]) -> None:
    for process in started:
        process.communicate(b"\n")
        assert process.returncode == 0


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_bcg_fixes", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def same_ranks() -> None:
    begin()
    # the main process has imported less, and the detokenizer nothing
    ranks = [start("rank", f"sglang::scheduler_TP{number}", *READY) for number in range(2)]
    ranks.append(start("rank", "sglang::detokenizer"))
    found = status()
    assert found.returncode == 0 and "DIFFER" not in found.stdout + found.stderr, found
    [line] = found.stdout.splitlines()
    assert line.startswith("OK     unknown model (2 ranks alike)  1 of 1 fixes live, "), line
    assert status("--pid", str(ranks[1].pid), "--require").stdout.splitlines() == [line]
    other = status("--pid", "1", "--require")
    assert other.returncode == 1 and other.stdout == "process 1 belongs to none of the servers that report\n", other
    titles = [line.split(",")[0] for line in status("-v").stdout.splitlines() if "  plan " in line]
    assert titles[1:] == ["detokenizer", "scheduler_TP0", "scheduler_TP1"], titles
    end(ranks)


def different_rank(steps: str, environ: str) -> list[Any]:
    """Status for people and for machines, and the numbers of the second rank and of the first."""
    begin()
    first = start("rank", "sglang::scheduler_TP0", *READY)
    second = start("rank", "sglang::scheduler_TP1", *json.loads(steps), **json.loads(environ))
    found, machine = status(), status("--json")
    assert found.returncode == machine.returncode == 1, found
    rows = json.loads(machine.stdout)["processes"]
    assert {row["server"] for row in rows} == {os.getpid()}, rows
    end([first, second])
    assert status().returncode == 0
    [server] = json.loads(machine.stdout)["servers"]
    return [found.stdout, server, str(second.pid), str(first.pid)]


def rank_that_still_loads() -> None:
    begin()
    first = start("rank", "sglang::scheduler_TP0", *READY)
    second = start("rank", "sglang::scheduler_TP1", "lose")
    assert status().returncode == 0
    end([first, second])


def main_process() -> None:
    plugin.load()
    scheduler = start("rank", "sglang::scheduler", *READY)
    print("ready", flush=True)
    input()
    end([scheduler])


def two_servers() -> None:
    """Start two servers from a process that has no plugin."""
    servers = [start("main_process", SGLANG_BCG_FIX_EXTRA_FIX=state) for state in ("off", "on")]
    found = status("--json")
    rows = json.loads(found.stdout)["processes"]
    assert found.returncode == 0 and len(rows) == 4, found
    assert sorted({row["server"] for row in rows}) == sorted(server.pid for server in servers), rows
    assert len({row["plan"] for row in rows}) == 2
    end(servers)


if __name__ == "__main__":
    named.run(globals())
