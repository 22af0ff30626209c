# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes report`: what is in the file, and above all what is not."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import stat
import subprocess
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import report_file
from tests import processes, wheels


def report(tmp_path: pathlib.Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"), **environ}
    file = () if "--file" in words else ("--file", str(tmp_path / "report.txt"))
    paths = [wheels.unpacked(wheels.NEWEST)]
    return processes.python("-m", "sglang_bcg_fixes", "report", *file, *words, paths=paths, environment=given)


def page(tmp_path: pathlib.Path) -> str:
    return (tmp_path / "report.txt").read_text()


def content(tmp_path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return found


def test_it_has_our_settings_and_the_names_of_others_only(tmp_path: pathlib.Path) -> None:
    done = report(tmp_path, SGLANG_BCG_FIXES="strict", SGLANG_API_KEY="sesame", HF_TOKEN="sesame")
    assert done.returncode == 0, done.stderr
    found = content(tmp_path)
    assert found["settings"]["SGLANG_BCG_FIXES"] == "strict" and "SGLANG_API_KEY" in found["other_settings"]
    assert found["format"] == 2 and found["doctor"]["defects"] and found["versions"]["torch"]
    assert "sesame" not in (tmp_path / "report.json").read_text() + page(tmp_path)
    assert re.search(r"^our flags +SGLANG_BCG_FIXES=strict$", page(tmp_path), re.MULTILINE)
    assert "SGLANG_API_KEY" in page(tmp_path) and "HF_TOKEN" not in page(tmp_path)


def test_the_text_is_one_page(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(f"bcg-fixes line {number} {'word ' * 400}\n" for number in range(50)))
    done = report(tmp_path, "--log", str(log))
    text = page(tmp_path)
    assert done.returncode == 0 and f"{tmp_path / 'report.txt'} is one page" in done.stdout, done.stderr
    assert len(text.splitlines()) <= 66 and max(map(len, text.splitlines())) <= 120
    for name in (
        "SGLang",
        "plugin",
        "GPU",
        "driver",
        "CUDA",
        "torch",
        "triton",
        "Python",
        "our flags",
        "doctor",
        "kernels",
    ):
        assert re.search(rf"^{name} {{2,}}\S", text, re.MULTILINE), name
    assert re.search(rf"^SGLang +{wheels.NEWEST}$", text, re.MULTILINE)
    assert re.search(rf"^torch +{re.escape(importlib.metadata.version('torch'))}$", text, re.MULTILINE)
    assert "NOT FIXED (context_parallel_capture," in text and "bcg-fixes line 49" in text
    assert "bcg-fixes line 30" not in text and len(content(tmp_path)["log"]) == 50


SMI = """#!/bin/sh
if [ $# = 0 ]; then echo "| NVIDIA-SMI 570.1  Driver Version: 570.133.20  CUDA Version: 12.8 |"; exit; fi
echo "NVIDIA H100 80GB HBM3, 81559 MiB, 570.133.20"
echo "NVIDIA H100 80GB HBM3, 81559 MiB, 570.133.20"
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (SMI, ["2 x NVIDIA H100 80GB HBM3 (81559 MiB)", "driver 570.133.20", "CUDA driver's CUDA 12.8"]),
        ("#!/bin/sh\necho no devices were found; exit 9\n", ["none: nvidia-smi does not answer: no devices were f"]),
        ("#!/bin/sh\n", ["none: nvidia-smi lists no GPU"]),
        (None, ["none: nvidia-smi is not installed"]),
    ],
    ids=["two", "ends with an error", "none", "absent"],
)
def test_gpu_and_driver_are_those_of_nvidia_smi(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: list[str]
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = " ".join(report_file.page(report_file.made("0.5.23", None, [], [], [])).split())
    assert all(words in shown for words in said), shown


def test_it_imports_no_torch(tmp_path: pathlib.Path) -> None:
    done = processes.python(
        *("-m", "tests.scenarios.bare_machine", "without_sglang_and_torch", "report", "--file", "-"),
        environment={"SGLANG_BCG_REPORT_DIR": str(tmp_path)},
    )
    assert done.returncode == 0 and re.search("^SGLang +not installed here$", done.stdout, re.MULTILINE), done.stderr
    assert re.search("^torch +[0-9]", done.stdout, re.MULTILINE) and "\ndoctor              no answer" in done.stdout


def test_a_dash_prints_the_page_and_writes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = report(tmp_path, "--file", "-")
    assert done.returncode == 0 and done.stdout.startswith("bcg-fixes report of 2"), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--file", "{0}"], "--file: {0} is a folder; name a file in it, such as {0}/report.txt"),
        (
            ["--file", "{0}/nowhere/x"],
            "--file: {0}/nowhere/x cannot be written (no such folder); name a file elsewhere",
        ),
        (["--file", "/proc/x"], "--file: /proc/x.json cannot be written (No such file or directory); name a file"),
        (["--log", "{0}"], "--log: {0} cannot be read (Is a directory); give a server's log file"),
        (["--log", "{0}/no.log"], "--log: {0}/no.log cannot be read (No such file or directory); give a server's log"),
    ],
)
def test_a_place_that_will_not_do_is_named(tmp_path: pathlib.Path, words: list[str], said: str) -> None:
    done = report(tmp_path, *(word.format(tmp_path) for word in words))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"bcg-fixes report: {said.format(tmp_path)}"), line
    assert list(tmp_path.glob("report*")) == []


def test_a_running_process_has_a_line_and_one_for_what_is_missing() -> None:
    row = {"id": "kda_raw_beta", "state": "lost", "detail": "somebody put the original back"}
    other = {"id": "no_bucket_fits", "state": "applied", "detail": ""}
    server = {"process": "TP0 (pid 7)", "title": "", "sglang": "0.5.23", "fixes": [row, other], "kernels": {}}
    made = report_file.made("0.5.23", None, [{**server, "argv": ["--api-key", "sesame", "--tp-size", "2"]}], [], [])
    shown = report_file.page(made)
    assert "  TP0 (pid 7): SGLang 0.5.23; 1 lost, 1 applied, no self-check\n" in shown
    assert "    flags: --api-key ... --tp-size 2\n" in shown and "sesame" not in shown
    assert shown.endswith("    lost: kda_raw_beta")


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
    files = [tmp_path / "report.json", tmp_path / "report.txt"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    again = report(tmp_path)
    assert again.returncode == 2 and "name another with --file" in again.stderr
    files[1].unlink()
    again = report(tmp_path, "--file", str(files[0]))
    assert again.returncode == 2 and f"{files[0]} is there already; name another with --file" in again.stderr


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
