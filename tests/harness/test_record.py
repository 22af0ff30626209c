# SPDX-License-Identifier: Apache-2.0
"""benchmarks/record.py: files are made on several GPUs, whatever one of the recordings does."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks import record
from sglang_bcg_fixes.source import releases
from tests import processes

WRITES = "import os, sys; open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
HANGS = "import time; time.sleep(999)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANGS}"
FAILS = "raise SystemExit('no such GPU')"


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch, release_root: Callable[[str], pathlib.Path]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(releases, "installed", lambda: releases.in_folder(release_root("0.5.12.post1")))
    monkeypatch.setattr(record, "SECONDS_TO_END", 0.5)
    bodies = {"writes": WRITES, "writes_too": WRITES, "hangs": HANGS, "deaf": DEAF, "fails": FAILS}
    recordings = {name: record.Recording(("-c", body, "FILE")) for name, body in bodies.items()}
    monkeypatch.setattr(record, "RECORDINGS", recordings)


def made(folder: pathlib.Path, *names: str) -> int:
    return record.main(["--folder", str(folder), "--only", ",".join(names), "--seconds", "3"])


def test_every_file_is_made_on_one_of_the_gpus(tmp_path: pathlib.Path) -> None:
    assert made(tmp_path, "writes", "writes_too") == 0
    files = sorted(tmp_path.glob("*.json"))
    assert [file.name for file in files] == ["writes-0.5.12.post1.json", "writes_too-0.5.12.post1.json"]
    assert {file.read_text() for file in files} <= {"3", "5"}


@pytest.mark.parametrize("wrong", ["hangs", "deaf", "fails"])
def test_one_that_fails_leaves_the_others_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert made(tmp_path, wrong, "writes") == 1
    assert (tmp_path / "writes-0.5.12.post1.json").is_file()
    told = {"fails": "exit status 1"}.get(wrong, "ended before it was done")
    log = tmp_path / f"{wrong}-0.5.12.post1.log"
    assert f"{wrong}: {told}" in capsys.readouterr().out and log.is_file()
    assert wrong != "fails" or "no such GPU" in log.read_text()


def test_what_is_whole_is_kept_and_what_was_cut_off_is_made_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off = record.Recording(("-c", f"{WRITES}; {HANGS}", "FILE"))
    monkeypatch.setitem(record.RECORDINGS, "cut_off", cut_off)
    monkeypatch.setitem(record.RECORDINGS, "resumes", dataclasses.replace(cut_off, resumes=True))
    for _ in range(2):
        made(tmp_path, "writes", "cut_off", "resumes")
    told = capsys.readouterr().out
    assert (told.count("is there; remove it"), told.count("ended before it was done")) == (1, 4)
    assert sorted(file.name for file in tmp_path.glob("*.json")) == [
        "cut_off-0.5.12.post1.partial.json",
        "resumes-0.5.12.post1.json",
        "writes-0.5.12.post1.json",
    ]


def test_a_name_that_is_not_known_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SystemExit, match=r"no recording 'write'.*writes"):
        made(tmp_path, "write")


def test_every_recording_takes_what_it_is_told() -> None:
    """Ask the real recordings: each command's own parser knows its options."""
    python = [sys.executable, str(processes.REPOSITORY / "benchmarks" / "record.py"), "--list"]
    lines = subprocess.run(python, capture_output=True, text=True, check=True, cwd=processes.REPOSITORY).stdout
    for line in lines.splitlines():
        name, *words = line.split()
        done = subprocess.run(
            [sys.executable, *words, "--help"], capture_output=True, text=True, cwd=processes.REPOSITORY
        )
        assert done.returncode == 0, (name, done.stderr)
        options = [word for word in words if word.startswith("--")]
        assert options and all(option in done.stdout for option in options), name
