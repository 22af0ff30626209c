# SPDX-License-Identifier: Apache-2.0
"""Fragments of changes/ become a version's section of CHANGELOG.md, each exactly once."""

from __future__ import annotations

import datetime
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import processes

HEAD = "# Changelog\n\nWords at the top.\n"


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "tools").mkdir()
    shutil.copy(processes.REPOSITORY / "tools" / "changelog.py", tmp_path / "tools")
    (tmp_path / "CHANGELOG.md").write_text(HEAD)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("how")
    return tmp_path


def note(checkout: pathlib.Path, name: str, text: str) -> None:
    (checkout / "changes" / f"{name}.md").write_text(text)


def gather(checkout: pathlib.Path, version: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, checkout / "tools" / "changelog.py", version], capture_output=True, text=True
    )


def left(checkout: pathlib.Path) -> list[str]:
    return sorted(file.name for file in (checkout / "changes").iterdir())


def test_fragments_become_a_section_sorted_and_wrapped_and_are_deleted(checkout: pathlib.Path) -> None:
    long = "word " * 40
    note(checkout, "z_last", "Z is\nlast.\n")
    note(checkout, "many", "- One is\n  first.\n- Two - the other - is second.\n")
    note(checkout, "a_first", f"{long}\n")
    done = gather(checkout, "0.2.0")
    assert done.returncode == 0, done.stderr
    first, second = long[: 5 * 23].rstrip(), long[: 5 * 17].rstrip()
    many = "- One is first.\n- Two - the other - is second.\n"
    section = f"## 0.2.0 ({datetime.date.today()})\n\n- {first}\n  {second}\n{many}- Z is last.\n"
    assert (checkout / "CHANGELOG.md").read_text() == f"{HEAD}\n{section}"
    assert left(checkout) == ["README.md"]


def test_a_later_version_stands_above_an_earlier_one(checkout: pathlib.Path) -> None:
    for version in ("0.2.0", "0.3.0rc1", "0.3.0"):
        note(checkout, "subject", f"Of {version}.")
        assert gather(checkout, version).returncode == 0
    lines = (checkout / "CHANGELOG.md").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("## ")] == ["0.3.0", "0.3.0rc1", "0.2.0"]
    assert [line for line in lines if line.startswith("- ")] == ["- Of 0.3.0.", "- Of 0.3.0rc1.", "- Of 0.2.0."]
    assert "\n\n\n" not in (checkout / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("version", "fragments", "said"),
    [
        ("0.2.0", {}, "changes/ has no fragment"),
        ("0.2.0", {"full": "Text.", "hollow": " \n"}, "changes/hollow.md is empty"),
        ("next", {"full": "Text."}, "'next' is not a version"),
        ("0.1.0", {"full": "Text."}, "has version 0.1.0 already"),
    ],
)
def test_what_cannot_be_gathered_is_an_error_and_changes_nothing(
    checkout: pathlib.Path, version: str, fragments: dict[str, str], said: str
) -> None:
    before = f"{HEAD}\n## 0.1.0 (2026-01-01)\n\n- Old.\n"
    (checkout / "CHANGELOG.md").write_text(before)
    for name, text in fragments.items():
        note(checkout, name, text)
    done = gather(checkout, version)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert (checkout / "CHANGELOG.md").read_text() == before
    assert left(checkout) == sorted(["README.md", *(f"{name}.md" for name in fragments)])
