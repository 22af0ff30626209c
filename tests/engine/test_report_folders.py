# SPDX-License-Identifier: Apache-2.0
"""Reports are found where servers put them, whatever the environment of who asks; no folder stops a server."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.process import procfs, report_folders
from tests import processes, wheels
from tests.engine import test_plugin
from tests.engine.test_plugin import OTHERS_OFF, Extra

extra = test_plugin.extra
SERVER = "from sglang_bcg_fixes import plugin; plugin.load(); print('ready', flush=True); input()"
WITHOUT_HOME = ("-m", "tests.scenarios.without_home")
Start = Callable[..., int]


def status(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "sglang_bcg_fixes", "status", *arguments, environment=environ)


@pytest.fixture
def server(extra: Extra, tmp_path: pathlib.Path) -> Iterator[Start]:
    """Start a process with the plugin and this environment; gives its number."""
    site = extra().site
    started: list[subprocess.Popen[str]] = []

    def start(**environ: str) -> int:
        whole = processes.environment_of(
            [processes.FAKE_SGLANG, site], {"FAKE_FORM": "enable", **OTHERS_OFF, **environ}
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", SERVER], env=whole, stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.communicate("\n", timeout=60)


@pytest.mark.parametrize("name", ["XDG_RUNTIME_DIR", "TMPDIR", "SGLANG_BCG_REPORT_DIR"])
def test_a_server_with_another_environment_is_found(server: Start, tmp_path: pathlib.Path, name: str) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir(mode=0o700)
    ours.mkdir(mode=0o700)
    pid = server(**{name: str(theirs)})
    found = status("--json", XDG_RUNTIME_DIR=str(ours))
    assert pid in {row["pid"] for row in json.loads(found.stdout)["processes"]}, found.stderr


def test_a_folder_that_was_told_is_the_only_one_and_others_are_hinted_at(server: Start, tmp_path: pathlib.Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    server(XDG_RUNTIME_DIR=str(tmp_path / "theirs"))
    found = status(SGLANG_BCG_REPORT_DIR=str(tmp_path / "told"))
    [line] = found.stdout.splitlines()
    assert line.startswith(f"no running process reports in {tmp_path / 'told'}: none has loaded the plugin, or it ")
    assert " report elsewhere; unset SGLANG_BCG_REPORT_DIR" in line and found.returncode == 0
    machine = status("--json", SGLANG_BCG_REPORT_DIR=str(tmp_path / "told"))
    # how many there are is anybody's business on this machine
    counted = re.compile(r"\d+ report elsewhere")
    assert json.loads(machine.stdout)["processes"] == [] and counted.sub("", line) in counted.sub("", machine.stderr)


def of_two_users(monkeypatch: pytest.MonkeyPatch, environments: Mapping[int, Mapping[str, str]]) -> None:
    """Processes numbered as their users are."""
    monkeypatch.setattr(procfs, "every", lambda: list(environments))
    monkeypatch.setattr(procfs, "user", lambda pid: pid)
    monkeypatch.setattr(procfs, "environ", environments.get)
    monkeypatch.setattr(report_folders, "usual", lambda: iter(()))


def private(folder: pathlib.Path, **more: object) -> pathlib.Path:
    folder.mkdir(mode=0o700, parents=True)
    started = procfs.start_ticks(os.getpid())
    content = {"pid": os.getpid(), "started": started, "process": "p", "sglang": "1", "plan": "x"} | more
    (folder / f"{os.getpid()}.json").write_text(json.dumps({**content, "fixes": [], "kernels": {}}))
    return folder


def test_root_sees_the_servers_of_others_where_their_environment_puts_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = private(tmp_path / "run" / "sglang-bcg-fixes")
    second = private(tmp_path / "tmp" / "sglang-bcg-fixes-1001")
    environments = {1000: {"XDG_RUNTIME_DIR": str(tmp_path / "run")}, 1001: {"TMPDIR": str(tmp_path / "tmp")}}
    of_two_users(monkeypatch, environments)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert report_folders.every()[1:] == [first, second]
    assert [found["pid"] for found in report_folders.live([first, second])] == [os.getpid()], "each process once"


def test_others_see_their_own_and_say_what_they_do_not_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = private(tmp_path / "sglang-bcg-fixes-1001")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert report_folders.live([folder]) == []
    assert "is not a private folder of this user" in (report_folders.problem(folder) or "")
    assert "as another user, whose reports that user and root see" in report_folders.nobody([folder])
    assert "a logout removes XDG_RUNTIME_DIR" in report_folders.nobody([folder])
    assert report_folders.problem(tmp_path / "not there") is None


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_can_use_is_not_read(tmp_path: pathlib.Path, mode: int) -> None:
    folder = private(tmp_path / "reports")
    assert report_folders.live([folder])
    folder.chmod(mode)
    assert report_folders.live([folder]) == [] and str(folder) in (report_folders.problem(folder) or "")
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    assert report_folders.live([link]) == [] and report_folders.problem(link)


def test_what_somebody_has_put_into_a_folder_of_his_own_does_no_harm(tmp_path: pathlib.Path) -> None:
    folder = private(tmp_path / "reports")
    os.mkfifo(folder / "1.json")
    (folder / "2.json").write_text("[]")
    (folder / "3.json").write_text(json.dumps({"pid": os.getpid(), "started": procfs.start_ticks(os.getpid())}))
    started = {"pid": os.getpid(), "started": procfs.start_ticks(os.getpid())}
    bent: dict[str, object] = {
        **started,
        "process": "bent",
        "sglang": "1",
        "plan": "x",
        "fixes": [{"id": "x"}],
        "kernels": {},
    }
    (folder / "4.json").write_text(json.dumps(bent))
    (folder / "5.json").write_text(json.dumps({**bent, "fixes": [], "kernels": {"x": "applied"}}))
    assert [content["process"] for content in report_folders.live([folder])] == ["p"]


def test_a_report_of_a_server_that_has_ended_points_to_its_log(tmp_path: pathlib.Path) -> None:
    folder = private(tmp_path / "reports", started=0)
    (folder / "2.json").write_text("[]")
    assert f"reports in {folder} (there are reports of 1 that run here no longer: see their logs): " in (
        report_folders.nobody([folder])
    )


def test_only_a_folder_of_ours_is_to_be_made_private(tmp_path: pathlib.Path) -> None:
    ours, other = private(tmp_path / "sglang-bcg-fixes"), private(tmp_path / "shared")
    for folder in (ours, other):
        folder.chmod(0o755)
    assert f"`chmod 700 {ours}`" in (report_folders.problem(ours) or "")
    assert "chmod" not in (report_folders.problem(other) or "chmod")


def test_doctor_tells_of_running_servers_or_where_it_looked(server: Start, tmp_path: pathlib.Path) -> None:
    def doctor() -> list[str]:
        done = processes.python(
            *("-m", "sglang_bcg_fixes", "doctor"),
            paths=[processes.FAKE_SGLANG],
            environment={"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports")},
        )
        return done.stdout.splitlines()

    assert any(line.startswith(f"no running process reports in {tmp_path / 'reports'}: ") for line in doctor())
    server(SGLANG_BCG_REPORT_DIR=str(tmp_path / "reports"))
    assert "running processes that have loaded the plugin: 1; `bcg-fixes status` shows what they have" in doctor()


def test_a_server_without_a_home_and_a_known_user_starts_and_reports(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = processes.python(
        *(*WITHOUT_HOME, "server"),
        paths=[processes.FAKE_SGLANG, extra().site],
        environment={"FAKE_FORM": "enable", "TMPDIR": str(tmp_path), **OTHERS_OFF},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / f"sglang-bcg-fixes-{os.getuid()}").is_dir()


def test_a_server_without_any_folder_to_write_to_starts_and_says_so(extra: Extra, tmp_path: pathlib.Path) -> None:
    done = processes.python(
        *(*WITHOUT_HOME, "server_without_a_folder"),
        paths=[processes.FAKE_SGLANG, extra().site],
        environment={"FAKE_FORM": "enable", **OTHERS_OFF},
    )
    assert done.returncode == 0 and "will not see this process: " in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", [["doctor", "--root", "ROOT"], ["list"], ["status"]])
def test_commands_need_no_home(arguments: list[str]) -> None:
    told = [str(wheels.unpacked("0.5.12.post1")) if each == "ROOT" else each for each in arguments]
    done = processes.python(*WITHOUT_HOME, "command", *told)
    assert done.returncode == 0, done.stderr


def test_what_is_kept_lies_in_a_temporary_folder_where_there_is_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert flags.cache_dir({}).name == f"sglang-bcg-fixes-cache-{os.getuid()}"
