# SPDX-License-Identifier: Apache-2.0
"""`make report`: what GitHub's gh is given, and what SGLang could not read in an issue."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import report

from tests import processes

KNOWN, UNSENT = "break_input_lifetime", "thinking_freed_in_cache"
GH = """#!/bin/sh
exec {python} -c 'import json, sys; print(json.dumps([sys.argv[1:], sys.stdin.read()]))' "$@"
"""


def send(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    gh = folder / "gh"
    gh.write_text(GH.format(python=sys.executable))
    gh.chmod(0o755)
    command = [sys.executable, str(processes.REPOSITORY / "tools" / "report.py"), *arguments]
    path = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, env=path, capture_output=True, text=True)


@pytest.mark.parametrize("name", [KNOWN, UNSENT])
def test_gh_gets_the_title_and_the_text(tmp_path: pathlib.Path, name: str) -> None:
    done = send(tmp_path, name)
    assert done.returncode == 0, done.stderr
    given, text = json.loads(done.stdout)
    title = (report.UPSTREAM / f"{name}.md").read_text().splitlines()[0].removeprefix("# ")
    assert given == ["issue", "create", "--repo", "sgl-project/sglang", "--title", title, "--body-file", "-"]
    assert text.startswith("Releases: ") and title not in text
    assert send(tmp_path, name, "--print").stdout == f"{title}\n\n{text}"


@pytest.mark.parametrize("name", ["", "README", "no_such_report"])
def test_without_a_report_nothing_is_sent(tmp_path: pathlib.Path, name: str) -> None:
    done = send(tmp_path, *filter(None, [name]))
    assert done.returncode == 2 and not done.stdout


@pytest.mark.parametrize("name", report.names())
def test_an_issue_shows_it_as_it_is_meant(name: str) -> None:
    _, text = report.read(name)
    prose = report.CODE.sub("", report.unwrapped(text))
    assert prose.split() == report.CODE.sub("", text).split()
    # no line goes on in the next one, and no link leads into this repository
    assert not re.search(r"\w,?\n[a-z(`]", prose)
    assert not re.findall(r"\]\((?!https://)[^)]*\)", prose)


def test_a_report_with_a_thread_is_known() -> None:
    assert report.threads(report.read(KNOWN)[1]) == ["37606", "37448"]
    assert not report.threads(report.read(UNSENT)[1])
    listed = (report.UPSTREAM / "README.md").read_text()
    assert f"`make report ID={UNSENT}`" in listed and f"ID={KNOWN}`" not in listed
