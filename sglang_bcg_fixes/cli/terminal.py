# SPDX-License-Identifier: Apache-2.0
"""Colour and the width of a terminal; into a pipe or a file a text goes as it is."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap

from sglang_bcg_fixes import flags

RED, GREEN, YELLOW = "31;1", "32", "33"
COLOURS = {
    "NOT FIXED": RED,
    "no server starts": RED,
    "does not start": RED,
    "NOT READ": YELLOW,
    "OFF": YELLOW,
    "UNDECIDED": YELLOW,
    "not read": YELLOW,
    "RANKS DIFFER": RED,
    "WRONG": RED,
    "CHECK": YELLOW,
    "OK": GREEN,
    "affected": RED,
    "unknown": YELLOW,
    "unread": YELLOW,
    "lost": RED,
    "failed": RED,
    "off": YELLOW,
    "pending": YELLOW,
    "fixed by the plugin": GREEN,
    "not fixed until the plugin is active": RED,
    "fixed": GREEN,
    "nothing to do": GREEN,
    "faster": GREEN,
    "applied": GREEN,
}
# a state begins its line
STATE = re.compile(rf"^ {{0,4}}({'|'.join(COLOURS)})(?=\W|$)")
# where a line goes on that is too long: below its last column, by what it begins with
BELOW = {
    r"(?:NOT FIXED|NOT READ|OFF|UNDECIDED|off by default|fixed|faster) +(?:auto|\S.{14,16} )": 28,
    r" {28}\w": 28,
    r" {10}\w": 21,
    r"(?:affected|latent|fixed|absent|unknown) ": 10,
    r" {4}\w": 16,
}
# or else below its second column, if that begins soon enough, or its first word
COLUMN = re.compile(r" *\S+(?: \S+)* {2,}")
SOON = 32
ITEM = re.compile(r" +\w+: ")
# somebody copies these, or follows them in an editor
WHOLE = re.compile(r"run: | {10}evidence ")
NARROWEST = 60


def show(text: str) -> None:
    """Print an answer to a person."""
    if not sys.stdout.isatty():
        print(text)
        return
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    for line in text.split("\n"):
        folded = fold(line, width)
        print(paint(folded) if flags.wants_colour() else folded)


def fold(line: str, width: int) -> str:
    if len(line) <= width or WHOLE.match(line):
        return line
    indent = next((column for begins, column in BELOW.items() if re.match(begins, line)), 0) or below(line)
    text = line.lstrip()
    return textwrap.fill(
        text,
        width,
        # kept even before a word that fits nowhere
        initial_indent=line[: len(line) - len(text)],
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def below(line: str) -> int:
    column, margin = COLUMN.match(line), len(line) - len(line.lstrip())
    if column and column.end() <= SOON:
        return column.end()
    return margin + 2 if not margin or ITEM.match(line) else margin


def paint(line: str) -> str:
    state = STATE.match(line)
    if state is None:
        return line
    start, end = state.span(1)
    return f"{line[:start]}\033[{COLOURS[state[1]]}m{line[start:end]}\033[0m{line[end:]}"
