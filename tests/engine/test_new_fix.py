# SPDX-License-Identifier: Apache-2.0
"""A ninth fix is one file: nothing else has to know of it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests import processes


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("sglang_bcg_fixes", "tools"):
        shutil.copytree(processes.REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(processes.REPOSITORY / "CONTRIBUTING.md", tmp_path)
    return tmp_path


def in_checkout(checkout: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(checkout), "PATH": "", "HOME": str(checkout)}
    return subprocess.run([sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True)


def test_a_copied_template_is_a_fix_with_flag_page_and_probe(checkout: pathlib.Path) -> None:
    made = in_checkout(checkout, "tools/new_fix.py", "stale_page_table")
    assert made.returncode == 0 and "sglang_bcg_fixes/fixes/stale_page_table.py" in made.stdout, made.stderr
    listed = in_checkout(checkout, "-m", "sglang_bcg_fixes", "list", "--flags")
    assert "SGLANG_BCG_FIX_STALE_PAGE_TABLE: " in listed.stdout, listed.stderr
    assert in_checkout(checkout, "-m", "sglang_bcg_fixes", "explain", "stale_page_table").returncode == 0
    (checkout / "sglang" / "srt").mkdir(parents=True)
    examined = in_checkout(checkout, "-m", "sglang_bcg_fixes", "doctor", "--all", "--root", str(checkout))
    assert "unknown   stale_page_table" in examined.stdout and examined.returncode == 3, examined.stdout


def test_the_printed_steps_are_those_of_contributing_for_this_id(checkout: pathlib.Path) -> None:
    printed = in_checkout(checkout, "tools/new_fix.py", "lost_row").stdout
    contributing = (checkout / "CONTRIBUTING.md").read_text().replace("stale_page_table", "lost_row")
    steps = printed.split("\n", 1)[1]
    assert steps in contributing and "stale_page_table" not in printed
    assert [line[:2] for line in steps.splitlines() if line[0].isdigit()] == [f"{number}." for number in range(1, 9)]
    for command in ("make forms ID=lost_row", "tests/fixes/test_lost_row.py", "make docs lint test-all"):
        assert f"`{command}`" in printed


@pytest.mark.parametrize(("name", "words"), [("Stale-Table", "cannot be an id"), ("break_output_lifetime", "exists")])
def test_a_bad_id_is_refused(checkout: pathlib.Path, name: str, words: str) -> None:
    made = in_checkout(checkout, "tools/new_fix.py", name)
    assert made.returncode == 2 and words in made.stderr


@pytest.mark.parametrize("said", ['id="another"', "doc=__doc__"])
def test_a_file_that_says_what_it_is_called_or_its_words_twice_is_an_error(checkout: pathlib.Path, said: str) -> None:
    fixes = checkout / "sglang_bcg_fixes" / "fixes"
    text = (fixes / "break_output_lifetime.py").read_text()
    (fixes / "another.py").write_text(text.replace("FIX = Fix(", f"FIX = Fix({said}, "))
    listed = in_checkout(checkout, "-m", "sglang_bcg_fixes", "list", "--flags")
    assert listed.returncode == 2 and "its FIX says its id or doc; leave both out" in listed.stderr, listed.stderr
