# SPDX-License-Identifier: Apache-2.0
"""Answers on a real terminal: coloured, folded, and otherwise those that a pipe gets."""

from __future__ import annotations

import os
import pathlib
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import terminal
from tests import processes
from tests.wheels import NEWEST

WIDTH = 72
COMMAND = ("-m", "sglang_bcg_fixes", "doctor", "--root")


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Everything that a command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm", "NO_COLOR": "", **environment}
    with subprocess.Popen([sys.executable, *arguments], stdout=theirs, env=settings) as process:
        os.close(theirs)
        written = b""
        # the end is an error of the system's, or nothing
        while part := read(ours):
            written += part
    os.close(ours)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


def read(terminal_of_ours: int) -> bytes:
    try:
        return os.read(terminal_of_ours, 1 << 16)
    except OSError:
        return b""


def words(text: str) -> list[str]:
    return text.split()


def test_a_terminal_gets_colours_and_lines_that_fit(release_root: Callable[[str], pathlib.Path]) -> None:
    root = str(release_root(NEWEST))
    shown, plain = on_a_terminal(*COMMAND, root), on_a_terminal(*COMMAND, root, NO_COLOR="1")
    assert f"\033[{terminal.GREEN}mfixed\033[0m     wrong answers (" in shown
    assert "\033" not in plain and "\033" not in on_a_terminal(*COMMAND, root, TERM="dumb")
    for line in plain.splitlines():
        assert len(line) <= WIDTH or terminal.WHOLE.match(line) or len(line.split()) == 1, line
    piped = processes.python(*COMMAND, root).stdout
    assert "\033" not in piped and max(map(len, piped.splitlines())) > WIDTH
    assert words(plain) == words(piped)


@pytest.mark.parametrize(
    ("line", "painted"),
    [
        ("NOT FIXED wrong answers     this: that", "\033[31;1mNOT FIXED\033[0m wrong answers     this: that"),
        ("fixed     crash or no start this: that", "\033[32mfixed\033[0m     crash or no start this: that"),
        ("1 NOT FIXED", "1 NOT FIXED"),
        ("    lost        this: that", "    \033[31;1mlost\033[0m        this: that"),
        ("OK     AModel :30000", "\033[32mOK\033[0m     AModel :30000"),
        ("WRONG  AModel :30000", "\033[31;1mWRONG\033[0m  AModel :30000"),
        ("    unread      this: that", "    \033[33munread\033[0m      this: that"),
        ("RANKS DIFFER: this", "\033[31;1mRANKS DIFFER\033[0m: this"),
        ("          action     it would be fixed", "          action     it would be fixed"),
        ("  NOT FIXED   this: that", "  \033[31;1mNOT FIXED\033[0m   this: that"),
        ("  not read    this: that", "  \033[33mnot read\033[0m    this: that"),
        ("  fixed       this: that", "  \033[32mfixed\033[0m       this: that"),
        ("offline", "offline"),
        ("", ""),
    ],
)
def test_a_state_is_painted_where_its_column_is(line: str, painted: str) -> None:
    assert terminal.paint(line) == painted


def test_a_long_line_goes_on_below_its_last_column() -> None:
    line = f"NOT FIXED wrong answers     this: {'word ' * 20}".rstrip()
    first, *rest = terminal.fold(line, 60).splitlines()
    assert first.startswith("NOT FIXED wrong answers     this: word") and rest
    assert all(line.startswith(f"{'':28}word") and len(line) <= 60 for line in rest)
    command = "run: SGLANG_PLUGINS=bcg_fixes python " + "--flag " * 20
    assert terminal.fold(command, 60) == command


@pytest.mark.parametrize(
    "arguments", [["list"], ["list", "--flags"], ["explain", "mamba2_checkpoint_grid"], ["explain", "gdn_extend"]]
)
def test_lists_and_pages_are_folded_on_a_terminal_alone(arguments: list[str]) -> None:
    command = ("-m", "sglang_bcg_fixes", *arguments)
    shown, piped = on_a_terminal(*command, NO_COLOR="1", COLUMNS="60"), processes.python(*command).stdout
    assert words(shown) == words(piped) and max(map(len, piped.splitlines())) > 100
    assert all(len(line) <= 60 or len(line.split()) == 1 for line in shown.splitlines())
    # a line that is folded stays behind the margin of the first
    margins = [len(line) - len(line.lstrip()) for line in shown.splitlines() if line]
    whole = iter([line for line in piped.splitlines() if line])
    left, margin = 0, 0
    for line, found in zip(filter(None, shown.splitlines()), margins, strict=True):
        if not left:
            first = next(whole)
            left, margin = len(first.split()), len(first) - len(first.lstrip())
            assert found == margin
        assert found >= margin
        left -= len(line.split())


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("  fixed       this: that", 14),
        ("  0.5.14 to 0.5.19  --page-size 1 (that)", 20),
        ("  this: that and more", 4),
        ("  A sentence of a paragraph.", 2),
        ("a title", 2),
        ("  a second column that begins so late that nothing fits below it   here", 2),
    ],
)
def test_the_next_line_begins_below_the_last_column(line: str, column: int) -> None:
    assert terminal.below(line) == column
    _, *rest = terminal.fold(f"{line} {'word ' * 20}".rstrip(), 60).splitlines()
    assert rest and all(next_one.startswith(f"{'':{column}}word") for next_one in rest[1:])


def test_colours_are_wanted_unless_the_environment_says_no() -> None:
    assert flags.wants_colour({"TERM": "xterm"}) and flags.wants_colour({"NO_COLOR": ""})
    assert not flags.wants_colour({"NO_COLOR": "1"}) and not flags.wants_colour({"TERM": "dumb"})
