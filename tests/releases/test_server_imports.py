# SPDX-License-Identifier: Apache-2.0
"""The order in which a server's own processes import SGLang, which no model in one process has."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes import flags
from tests import processes
from tests.wheels import RELEASES

PROCESSES = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")


@pytest.mark.parametrize("release", RELEASES)
def test_every_fix_is_applied_or_waits_in_the_order_of_a_servers_imports(
    release_root: Callable[[str], pathlib.Path], release: str, tmp_path: pathlib.Path
) -> None:
    # one of the two orders each: both failed in the very same releases
    module = PROCESSES[RELEASES.index(release) % len(PROCESSES)]
    environment = {"SGLANG_BCG_REPORT_DIR": str(tmp_path), flags.FIXES: "strict"}
    arguments = ("-m", "tests.scenarios.imported_by_a_server", module)
    states = processes.result(processes.on_cpu(release_root(release), *arguments, environment=environment, cold=True))
    assert {state for state, _ in states.values()} <= {"applied", "pending", "not needed", "off"}, states
    assert "applied" in {state for state, _ in states.values()}
