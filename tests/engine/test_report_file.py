# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes report`: what is in the file, and above all what is not."""

from __future__ import annotations

import json
import pathlib
import stat
import subprocess
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import report_file
from tests import processes, wheels


def report(tmp_path: pathlib.Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"), **environ}
    file = ("--file", str(tmp_path / "report.json"))
    paths = [wheels.unpacked(wheels.NEWEST)]
    return processes.python("-m", "sglang_bcg_fixes", "report", *file, *words, paths=paths, environment=given)


def content(tmp_path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return found


def test_it_has_our_settings_and_the_names_of_others_only(tmp_path: pathlib.Path) -> None:
    done = report(tmp_path, SGLANG_BCG_FIXES="strict", SGLANG_API_KEY="sesame", HF_TOKEN="sesame")
    assert done.returncode == 0, done.stderr
    found = content(tmp_path)
    assert found["settings"]["SGLANG_BCG_FIXES"] == "strict" and "SGLANG_API_KEY" in found["other_settings"]
    assert found["format"] == 1 and found["doctor"]["defects"] and found["versions"]["torch"]
    assert "sesame" not in (tmp_path / "report.json").read_text()


def test_it_can_be_made_with_a_setting_that_is_refused(tmp_path: pathlib.Path) -> None:
    assert report(tmp_path, SGLANG_BCG_FIXES="offf").returncode == 0
    found = content(tmp_path)
    assert found["doctor"] is None and any("did you mean off" in note for note in found["notes"])


def test_of_a_log_it_has_our_lines_only(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"prompt: sesame\n[12:00] bcg-fixes 0.1.0 on sglang 0.5.23: applied a\n\xff bcg-fixes self-check\n")
    assert report(tmp_path, "--log", str(log)).returncode == 0
    assert [line.partition("bcg-fixes")[1] for line in content(tmp_path)["log"]] == ["bcg-fixes"] * 2


def test_it_overwrites_nothing_and_is_private(tmp_path: pathlib.Path) -> None:
    assert report(tmp_path).returncode == 0
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o600
    again = report(tmp_path)
    assert again.returncode == 2 and "name another with --file" in again.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch_server", "--tp-size", "2"], ["--tp-size", "2"]),
        (["--api-key", "1234", "--page-size=64"], ["--api-key", "...", "--page-size=64"]),
        (["--attention-backend", "fa3", "--api-key=sesame"], ["--attention-backend", "fa3", "--api-key=..."]),
        (
            ["--model-path", "/home/me/secret", "--disable-radix-cache"],
            ["--model-path", "...", "--disable-radix-cache"],
        ),
        (["--cuda-graph-bs-prefill", "64", "128"], ["--cuda-graph-bs-prefill", "64", "128"]),
        (["--cuda-graph-backend-prefill", "breakable"], ["--cuda-graph-backend-prefill", "breakable"]),
        (["--mamba-radix-cache-strategy", "a b;c"], ["--mamba-radix-cache-strategy", "..."]),
    ],
)
def test_of_a_command_it_has_flags_numbers_and_choices(words: list[str], told: list[str]) -> None:
    assert list(report_file.flags_of(words)) == told


def test_of_a_process_it_has_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report_file.process({"plan": "1f", "argv": ["--api-key", "sesame"], "of another version": "sesame"})
    assert found == {"plan": "1f", "flags": ["--api-key", "..."]}


def test_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert report_file.without_home({"a": ["/home/me/x", "/home/me"]}) == {"a": ["~/x", "~"]}


def test_settings_of_sglang_under_our_prefix_are_its_own() -> None:
    environ = {"SGLANG_BCG_TEXT_BUCKETS": "1", "SGLANG_BCG_CANARY": "2", "SGLANG_PLUGINS": "x", "PATH": "y"}
    assert flags.of_ours(environ) == {"SGLANG_BCG_CANARY": "2", "SGLANG_PLUGINS": "x"}
    assert flags.names_of_others(environ) == ["SGLANG_BCG_TEXT_BUCKETS"]
