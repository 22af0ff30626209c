# SPDX-License-Identifier: Apache-2.0
"""The later report of a running process on its fixes: still live, and reached."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.engine import call_counts, wrappers
from sglang_bcg_fixes.model import How
from sglang_bcg_fixes.process import report
from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import EXTRA, Extra

extra = test_plugin.extra
OTHER_PLUGIN = processes.REPOSITORY / "tests" / "scenarios" / "other_plugin.py"


def test_what_is_live_when_a_runner_has_been_built_is_said_once(extra: Extra) -> None:
    done = extra().scenario("reading_back", "live_when_built")
    assert done.stderr.count("verified when") == 1 and done.stderr.count("applied extra_fix; ") == 1, done.stderr


@pytest.mark.parametrize(
    ("change", "slot", "holder"),
    [
        ("replaced function", "function", f"function from {OTHER_PLUGIN}:"),
        ("replaced method", "Thing.method", f"Thing.method from {OTHER_PLUGIN}:"),
        ("replaced class", "Thing.method", f"Thing.method from {OTHER_PLUGIN}:"),
        ("reloaded module", "function", f"function from {processes.FAKE_SGLANG / 'sglang/srt/target.py'}:"),
        ("deleted function", "function", "nothing"),
    ],
    ids=["function", "method", "class", "reload", "deleted"],
)
def test_what_another_plugin_has_replaced_is_lost(extra: Extra, change: str, slot: str, holder: str) -> None:
    done = extra().scenario("reading_back", "lost", change)
    words = f"sglang.srt.target:{slot} holds {holder}"
    [warning] = [line for line in done.stderr.splitlines() if "was applied and is LOST" in line]
    assert warning.startswith("bcg-fixes: extra_fix ") and words in warning, warning
    assert "Switch off the plugin" in warning and "SGLANG_BCG_FIX_EXTRA_FIX=off" in warning, warning
    line = processes.result(done)
    assert line.split()[:2] == ["lost", "extra_fix:"] and words in line, line


@pytest.mark.parametrize(
    ("occasion", "environ"), [("build", {"SGLANG_BCG_FIXES": "strict"}), ("batch", {"SGLANG_BCG_FIX_EXTRA_FIX": "on"})]
)
def test_a_lost_fix_that_is_required_ends_the_process(extra: Extra, environ: dict[str, str], occasion: str) -> None:
    done = extra().scenario("reading_back", "required", occasion, **environ, status=1)
    assert "swallowed" not in done.stdout, done.stderr
    assert "refuses to serve without SGLANG_BCG_FIX_EXTRA_FIX (lost): sglang.srt.target:function holds" in done.stderr


@pytest.mark.parametrize(
    "change",
    ["wrapped function", "wrapped method", "wrapped twice", "class that calls it", "partial", "lru_cache", "default"],
)
def test_what_another_plugin_has_wrapped_is_live_and_named(extra: Extra, change: str) -> None:
    done = extra().scenario("reading_back", "wrapped", change, SGLANG_BCG_FIXES="strict")
    status = processes.result(done)
    assert " applied     extra_fix (" in status, status + done.stderr
    for text in (status, done.stderr):
        assert "1 live; extra_fix: sglang.srt.target:" in text and " is inside " in text, text


def test_a_subclass_that_takes_a_class_s_place_and_inherits_keeps_the_fix(extra: Extra) -> None:
    extra().scenario("reading_back", "subclass_takes_its_place")


def test_a_fix_that_comes_back_is_applied_again(extra: Extra) -> None:
    done = extra().scenario("reading_back", "comes_back")
    assert processes.result(done).split()[0] == "applied", done.stderr


@pytest.mark.parametrize(
    ("environ", "status"),
    # SGLang's own code is right: what nobody named is not worth a server
    [
        ({"SGLANG_BCG_FIXES": "strict"}, 0),
        ({"SGLANG_BCG_KERNEL_EXTRA_OP": "triton"}, 1),
        ({"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_KERNEL_EXTRA_OP": "triton"}, 1),
    ],
)
def test_a_kernel_that_another_plugin_has_replaced_is_lost(extra: Extra, environ: dict[str, str], status: int) -> None:
    text = test_plugin.with_kernel(point="Thing.static").replace("bodies:through_kernel", "bodies:around")
    done = extra(text=text).scenario("reading_back", "lost_kernel", **environ, status=status)
    words = f"sglang.srt.target:Thing.static holds Thing.static from {OTHER_PLUGIN}:"
    if status:
        assert f"refuses to serve without SGLANG_BCG_KERNEL_EXTRA_OP (lost): {words}" in done.stderr, done.stderr
        return
    [warning] = [line for line in done.stderr.splitlines() if "was applied and is LOST" in line]
    assert warning.startswith("bcg-fixes: extra_op ") and words in warning, warning
    assert "kernels extra_op triton (lost)" in done.stderr
    assert f"lost        extra_op, triton: {words}" in processes.result(done)


def test_nothing_is_hooked_where_nothing_is_applied(extra: Extra) -> None:
    extra().scenario("reading_back", "nothing_hooked", SGLANG_BCG_FIXES="off")


def test_a_place_that_cannot_be_watched_is_a_warning(extra: Extra) -> None:
    done = extra().scenario("reading_back", "unwatched_place")
    assert "batches are not watched, so fixes may get lost unseen: no sglang.srt.model_executor" in done.stderr


@pytest.mark.parametrize(("environ", "status"), [({}, 0), ({"SGLANG_BCG_FIXES": "strict"}, 1)])
def test_what_cannot_be_read_back_is_not_called_live(extra: Extra, environ: dict[str, str], status: int) -> None:
    done = extra().scenario("reading_back", "read_back_fails", **environ, status=status)
    assert "Traceback" in done.stderr and "cannot" in done.stderr, done.stderr
    assert ("refuses to serve" in done.stderr) is bool(environ), done.stderr


def test_status_counts_the_calls_of_a_running_process(extra: Extra) -> None:
    extra().scenario("reading_back", "counted_calls")


@pytest.mark.parametrize(("how", "body"), [("BEFORE", "seen_before"), ("AFTER", "after"), ("REPLACE", "replace")])
def test_every_way_of_patching_counts(extra: Extra, how: str, body: str) -> None:
    text = EXTRA.replace("How.AROUND", f"How.{how}").replace("bodies:around", f"bodies:{body}")
    extra(text=text).scenario("reading_back", "counted_by_every_body")


@pytest.mark.parametrize("form", ["enable", "stub", "object"])
def test_a_break_counts_what_its_replay_runs(extra: Extra, form: str) -> None:
    text = EXTRA.replace("How.AROUND", "How.GRAPH_BREAK").replace("bodies:around", "bodies:break_body")
    text = text.replace("target:function", "breaks:broken_operation").replace("target:SECOND", "breaks:forgotten")
    extra(text=text).scenario("reading_back", "counted_by_a_break", FAKE_FORM=form)


def test_an_applied_fix_that_no_batch_reaches_is_shown_as_such(extra: Extra) -> None:
    text = EXTRA.replace("target:function", "copies:use")
    done = extra(text=text).scenario("reading_back", "never_reached")
    status = processes.result(done)
    # the first one was there when the fixes were read back
    assert "extra_fix (never reached in 2 batches)" in status and "; 2 batches since" in status, status


def test_a_forked_child_counts_and_reports_for_itself(extra: Extra) -> None:
    done = extra().scenario("reading_back", "forked_child")
    # each batch calls it once, and shows what was counted before it
    assert done.stdout.splitlines() == ["100 2", "RESULT 3"], done.stdout


def test_two_servers_on_one_machine_are_told_apart(extra: Extra) -> None:
    done = extra().scenario("reading_back", "two_servers")
    assert processes.result(done) == [0, 40], done.stdout + done.stderr


def test_a_report_folder_that_cannot_be_written_hides_no_loss(extra: Extra, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = extra().scenario("reading_back", "lost_unseen", SGLANG_BCG_REPORT_DIR=str(tmp_path / "file" / "reports"))
    assert "extra_fix of extra-fixes was applied and is LOST" in done.stderr, done.stderr
    assert done.stderr.count("`bcg-fixes status` will not see this process") == 1, done.stderr


def test_what_was_verified_once_is_not_called_live_where_it_cannot_be_verified_again(extra: Extra) -> None:
    done = extra().scenario("reading_back", "read_back_fails_later")
    assert "the fixes could not be verified when" in done.stderr, done.stderr
    assert processes.result(done) == [True, None], done.stdout


def test_an_earlier_report_does_not_outlive_one_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    class Told:
        def as_dict(self) -> dict[str, str]:
            return {"state": "applied"}

    class Unwritable:
        def as_dict(self) -> dict[str, str]:
            (tmp_path / f"{os.getpid()}.tmp").mkdir()
            return {}

    folder = tmp_path
    folder.chmod(0o700)
    file = report.write(Told(), folder, is_taken_along=False)  # type: ignore[arg-type]
    assert file.exists()
    with pytest.raises(OSError):
        report.write(Unwritable(), folder, is_taken_along=False)  # type: ignore[arg-type]
    assert not file.exists()


@pytest.mark.parametrize(("title", "status"), [("sglang::data_parallel_controller", -signal.SIGQUIT), ("python", 1)])
def test_a_controller_does_not_wait_for_a_scheduler_that_refuses(title: str, status: int) -> None:
    child = "import sys; from sglang_bcg_fixes.process import log; log.refuse('it refuses')"
    # a shell in the background starts its programs with this signal ignored
    begins = "import signal, subprocess, sys; signal.signal(signal.SIGQUIT, signal.SIG_DFL)"
    parent = f"{begins}; sys.exit(subprocess.run([{sys.executable!r}, '-c', {child!r}]).returncode)"
    done = subprocess.run(
        [title, "-c", parent], executable=sys.executable, capture_output=True, text=True, cwd=processes.REPOSITORY
    )
    assert done.returncode == status and "it refuses" in done.stderr, done


def test_counts_that_cannot_be_had_are_unknown(extra: Extra) -> None:
    done = extra().scenario("reading_back", "unknown_counts")
    assert "extra_fix (calls unknown)" in processes.result(done), done.stdout + done.stderr


def test_memory_that_the_kernel_refuses_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(os, "ftruncate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no space"):
        call_counts.Tally().publish()
    assert os.listdir("/proc/self/fd") == before


def test_torch_s_compiler_traces_what_is_patched_and_counts_nothing() -> None:
    pytest.importorskip("torch")
    done = processes.python("-m", "tests.scenarios.reading_back", "compiled", timeout=180)
    assert done.returncode == 0, done.stderr


def test_a_fix_is_found_in_an_object_that_holds_it_and_not_behind_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_counts, "TALLY", call_counts.Tally())

    def original(x: int) -> int:
        return x

    def body(original: Callable[[int], int], x: int) -> int:
        return original(x)

    class Caller:
        def __init__(self, inner: Callable[[int], int]) -> None:
            self.inner = inner

        def __call__(self, x: int) -> int:
            return self.inner(x)

    class Namespace:
        inner: Any = None

        def __new__(cls, x: int) -> Any:
            return x

    patched = wrappers.rebuild("module:original", original, How.AROUND, body, "a_fix")
    Namespace.inner = staticmethod(patched)
    assert wrappers.fixes_in(Caller(patched)) == {"a_fix"}
    assert wrappers.fixes_in(Namespace) == set()
