# SPDX-License-Identifier: Apache-2.0
"""The manual page: nothing of the parser or the table of flags is missing, and roff reads it without a warning."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator

import make_docs
import man_page
import pytest

from sglang_bcg_fixes.cli import main

PAGE = make_docs.MANUAL.read_text()
NEEDS_GROFF = pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")


def formatted(page: str) -> str:
    """Text as `man` shows it, on long lines and without bold or underlined letters."""
    command = ["groff", "-man", "-Tascii", "-P-cbou", "-rLL=2000n", "-ww"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)
        yield from set(action.option_strings) - {"-h", "--help"}


@NEEDS_GROFF
def test_it_has_every_command_option_and_flag_and_no_warning() -> None:
    shown = formatted(PAGE)
    commands = re.findall(r"^ {3}(\w+)$", shown, re.MULTILINE)
    assert {"doctor", "bisect", "completion", "verify"} <= set(commands) and len(commands) == 8
    missing = [option for option in options_of(main.parser()) if not re.search(rf"(?<![\w-]){option}(?!\w)", shown)]
    assert not missing
    names = re.findall(r"^\| `(\w+)` \|", (make_docs.DOCS / "flags.md").read_text(), re.MULTILINE)
    assert len(names) > 50 and [name for name in names if f"       {name}=" not in shown] == []


@NEEDS_GROFF
@pytest.mark.parametrize("words", ["a\\b", ".TH is no request", "'quoted'", "-x --long", "a  b\nc"])
def test_words_are_shown_as_they_are(words: str) -> None:
    shown = formatted(f'.TH A 1 "" ""\n.SH B\n{man_page.text(words)}\n')
    assert f"\n       {' '.join(words.split())}\n" in shown


def test_a_page_that_is_old_is_out_of_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["make_docs.py", "--check"])
    assert make_docs.main() == 0
    monkeypatch.setattr(man_page, "DESCRIPTION", "Something else.")
    assert make_docs.main() == 1
    assert capsys.readouterr().err == "sglang_bcg_fixes/cli/bcg-fixes.1 is out of date; run `make docs`\n"
