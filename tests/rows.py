# SPDX-License-Identifier: Apache-2.0
"""A process that runs rows of tests/ledger.py: a test file's tests on one release, each row in a fork of its own.

So what a row reads is what its own processes read, and no row sees what another has imported. What is asked comes as a
line of JSON, and so goes the answer; see `Row.run` in tests/ledger.py.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from typing import Any

import pytest
import torch
import triton.language

from tests import warm

# imported before a row is forked, as each would for itself
IMPORTED = (torch, triton.language)


class Chosen:
    """Pytest's plugin for a row: its items alone, and what became of each."""

    def __init__(self, release: str, only: list[str]) -> None:
        self.release = release
        self.only = set(only)
        self.outcomes: dict[str, str] = {}
        self.told: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        from tests import conftest

        chosen = [item for item in items if conftest.row_of(item) == self.release]
        if self.only:
            chosen = [item for item in chosen if item.nodeid in self.only]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
        # one that is never reported has failed, too
        self.outcomes = {item.nodeid: "failed" for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        if report.when == "setup" or report.outcome != "passed":
            self.outcomes[name] = report.outcome if report.outcome != "passed" else self.outcomes[name]
        if report.when == "call" and report.passed:
            self.outcomes[name] = "passed"
        if not report.passed:
            self.told[name] = report.longreprtext


def run(asked: dict[str, Any]) -> int:
    """Run a row in this process, and leave in its folder what became of each test."""
    chosen = Chosen(asked["release"], asked["only"])
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", asked["file"]]
    status = int(pytest.main(arguments, plugins=[chosen]))
    pathlib.Path(asked["result"]).write_text(json.dumps({"outcomes": chosen.outcomes, "told": chosen.told}))
    return status


def enter(asked: dict[str, Any]) -> None:
    os.environ["TESTS_TRACE"] = asked["folder"]
    os.environ["TESTS_PATIENCE"] = str(asked["patience"])
    traced = sys.modules["bcg_traced"]
    traced.begin()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    # its own, so that a row that hangs is ended with all that it has started
    os.setpgid(0, 0)


def waited_for(child: int, seconds: float) -> int | None:
    """The exit status, or None where it took too long and was killed."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def main() -> None:
    # beside the notes, in a folder of the ledger's that goes with it
    starters = tempfile.mkdtemp(dir=os.path.dirname(os.environ["TESTS_TRACE"]))
    lifeline, _held = os.pipe()
    os.set_inheritable(lifeline, True)
    os.environ[warm.STARTERS], os.environ[warm.LIFELINE] = starters, str(lifeline)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not come along into a forked process"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            enter(asked)
            warm.leave(run(asked))
        status = waited_for(child, asked["seconds"])
        print(json.dumps(status), flush=True)


if __name__ == "__main__":
    main()
