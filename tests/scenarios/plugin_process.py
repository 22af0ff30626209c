# SPDX-License-Identifier: Apache-2.0
"""Processes beside the fake SGLang that load the plugin; most scenarios assert by themselves."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any, TextIO
from unittest import mock

from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process import report
from tests.scenarios import debugged, named

EXTRA = "extra_fix"
# ours, at the beginning of a load and at its end
FAILURES: dict[str, Any] = {
    "before": mock.patch.object(registry, "discover", lambda: None),
    "after": mock.patch.object(report.Report, "line", lambda self: 1 / 0),
}


def patched() -> None:
    from sglang.srt import target

    assert target.function(1) == ["around", "function", 1, 1]
    assert target.Thing().method(1)[0] == "around"


def collector_rests(before: str) -> None:
    if before == "disabled":
        gc.disable()
    importlib.import_module("sglang.srt.target")
    assert plugin.load().report.state(EXTRA) == "applied"
    assert gc.isenabled() is (before == "enabled")
    assert ast.Module not in map(type, gc.get_objects()), "no server needs the trees any more"


def comes_with_the_import() -> None:
    process = plugin.load()
    [file] = pathlib.Path(os.environ["SGLANG_BCG_REPORT_DIR"]).iterdir()

    def state() -> str:
        states = {fix["id"]: fix["state"] for fix in json.loads(file.read_text())["fixes"]}
        return str(states[EXTRA])

    assert not [name for name in sys.modules if name.startswith("sglang.")]
    assert state() == "pending" and process.report.state(EXTRA) == "pending"
    from sglang.srt.copies import function, use

    target: Any = sys.modules["sglang.srt.target"]
    patched()
    assert function is target.function and use(1)[0][0] == "around"
    assert type(target.__spec__.loader).__name__ == "SourceFileLoader"
    assert state() == "applied" and process.ledger.read_back(EXTRA) == []
    importlib.reload(target)


def outer_first() -> None:
    process = plugin.load()
    from sglang.srt.outer import outer

    assert process.report.state(EXTRA) == "applied"
    from sglang.srt import outer as module

    assert module.outer(1) == ["around", "outer", "around", "function", 1, 1], module.outer(1)
    assert outer is module.outer and process.ledger.read_back(EXTRA) == []


def outer_by_the_fix_alone() -> None:
    process = plugin.load()
    importlib.import_module("sglang.srt.target")
    assert "sglang.srt.outer" in sys.modules
    assert process.report.state(EXTRA) == "applied"
    assert sys.modules["sglang.srt.outer"].outer(1) == ["around", "outer", "around", "function", 1, 1]
    assert process.ledger.read_back(EXTRA) == []


def two_together(*called: str) -> None:
    process = plugin.load()
    assert importlib.import_module("sglang.srt.outer").outer(1) == [*called, "around", "function", 1, 1]
    for name in ("early_fix", "late_fix"):
        assert process.report.state(name) == "applied" and process.ledger.read_back(name) == []


def one_fails_around_and_beneath_the_other() -> None:
    process = plugin.load()
    target = importlib.import_module("sglang.srt.target")
    assert process.ledger.applied() == ["late_fix"] and process.ledger.read_back("late_fix") == []
    assert target.function(1) == ["outer", "function", 1, 1]
    assert sys.modules["sglang.srt.outer"].outer(1) == ["outer", "outer", "outer", "function", 1, 1]
    assert target.Thing().method(1)[:2] == ["outer", "method"]


def an_import_while_one_is_told() -> None:
    class Importing(logging.StreamHandler[TextIO]):
        def format(self, record: logging.LogRecord) -> str:
            importlib.import_module("sglang.srt.circle")
            return super().format(record)

    process = plugin.load()
    # what is there already lets nothing be patched within
    importlib.import_module("tests.engine.bodies")
    logging.getLogger("sglang_bcg_fixes").addHandler(Importing())
    importlib.import_module("sglang.srt.outer")
    assert process.ledger.applied() == ["late_fix"] and process.ledger.read_back("late_fix") == []
    assert process.report.state("late_fix") == "applied"


def a_hook_around_one_that_fails() -> None:
    process = plugin.load()
    # it keeps what the first one changes
    importlib.import_module("sglang.srt.lists")
    importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner().forward(1)
    assert process.ledger.applied() == ["late_fix"] and process.ledger.read_back("late_fix") == []
    assert call_counts.TALLY.sum("batches") == 1 and process.watches.read_back("batches") == []


def inside_a_circle() -> None:
    process = plugin.load()
    importlib.import_module("sglang.srt.circle")
    assert process.report.state(EXTRA) == "pending" and "sglang.srt.circle_end" not in sys.modules
    assert "colorsys" not in sys.modules
    importlib.import_module("colorsys")
    assert process.report.state(EXTRA) == "applied" and process.ledger.read_back(EXTRA) == []
    assert sys.modules["sglang.srt.circle_end"].end(1) == ["around", "end", "begin", "around", "function", 1, 1]


def inside_a_chain() -> None:
    process = plugin.load()
    used = importlib.import_module("sglang.srt.chain").USED
    assert used == ["around", "end", "begin", "around", "function", 1, 1], "applied before it is used"
    assert process.report.state(EXTRA) == "applied" and process.ledger.read_back(EXTRA) == []


def one_import_after_the_other() -> None:
    process = plugin.load()
    importlib.import_module("sglang.srt.target")
    assert process.report.state(EXTRA) == "applied" and process.report.ids("pending") == ["rare_fix"]
    for _ in range(2):
        from sglang.srt.model_executor.model_runner import ModelRunner

        ModelRunner().forward(1)


def awaited_module_breaks() -> None:
    process = plugin.load()
    for _ in range(2):
        try:
            importlib.import_module("sglang.srt.target_that_breaks")
        except RuntimeError as error:
            assert str(error) == "its own"
        else:
            raise AssertionError("swallowed")
    assert process.report.state(EXTRA) == "pending"


def caught() -> None:
    """Load it as SGLang does, which swallows what a plugin raises."""
    importlib.import_module("sglang.srt.target")
    try:
        plugin.load()
    except Exception:
        print("swallowed")


def failure_caught(when: str) -> None:
    with FAILURES[when]:
        caught()


def parent(environment: str) -> None:
    """Load it, and so does a child with this change to the environment."""
    importlib.import_module("sglang.srt.target")
    plugin.load()
    os.environ.update(json.loads(environment))
    child = subprocess.run([sys.executable, "-c", "from sglang_bcg_fixes import plugin; plugin.load()"])
    raise SystemExit(child.returncode)


def parent_of_a_zombie() -> Any:
    """The processes that status shows when a child has been killed and nobody has waited for it."""
    importlib.import_module("sglang.srt.target")
    plugin.load()
    code = "from sglang_bcg_fixes import plugin; plugin.load(); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout and child.stdout.readline() == b"ready\n"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{child.pid}/stat")
    shown = subprocess.run([sys.executable, "-m", "sglang_bcg_fixes", "status", "--json"], stdout=subprocess.PIPE)
    return json.loads(shown.stdout)["processes"]


def forks() -> None:
    importlib.import_module("sglang.srt.target")
    plugin.load()
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    assert len(os.listdir(os.environ["SGLANG_BCG_REPORT_DIR"])) == 1


def logs() -> None:
    logging.basicConfig(level=logging.DEBUG, format="LOGGED %(levelname)s %(message)s")
    plugin.load()


if __name__ == "__main__":
    if sys.argv[1] != logs.__name__:
        debugged.show()
    named.run(globals())
