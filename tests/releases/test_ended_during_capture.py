# SPDX-License-Identifier: Apache-2.0
"""A process that is told to end while a real release captures its prefill graphs."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests import processes
from tests.wheels import NEWEST

SECONDS_TO_START, SECONDS_TO_END = 240, 15


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
@pytest.mark.parametrize(("how", "status", "left"), [("at once", -signal.SIGTERM, 1), ("in order", 0, 0)])
def test_it_ends_and_is_shown_no_more(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, release: str, how: str, status: int, left: int
) -> None:
    reports = tmp_path / "reports"
    given = {**processes.ON_CPU, "SGLANG_BCG_REPORT_DIR": str(reports)}
    environment = processes.environment_of([release_root(release)], given)
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "tests.scenarios.slow_capture", how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
        ) as process,
    ):
        limit = threading.Timer(SECONDS_TO_START, process.kill)
        limit.start()
        try:
            assert process.stdout
            # SGLang prints before it
            assert b"capturing\n" in process.stdout, log.read_text()[-2000:]
            assert [int(row["pid"]) for row in shown(environment)] == [process.pid]
            process.terminate()
            assert process.wait(SECONDS_TO_END) == status
        finally:
            limit.cancel()
            process.kill()
    assert len(list(reports.iterdir())) == left
    assert shown(environment) == []
    again = processes.python(*("-c", "from sglang_bcg_fixes import plugin; plugin.load()"), environment=environment)
    assert again.returncode == 0 and list(reports.iterdir()) == [], "the next process cleans up"


def shown(environment: dict[str, str]) -> list[dict[str, str]]:
    done = processes.python("-m", "sglang_bcg_fixes", "status", "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, str]] = json.loads(done.stdout)["processes"]
    return rows
