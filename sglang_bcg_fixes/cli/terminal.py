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
    "RANKS DIFFER": RED,
    "affected": RED,
    "unknown": YELLOW,
    "lost": RED,
    "failed": RED,
    "off": YELLOW,
    "waiting": YELLOW,
    "fixed by the plugin": GREEN,
    "fixed": GREEN,
    "nothing to do": GREEN,
    "faster": GREEN,
    "applied": GREEN,
}
# a state begins its line
STATE = re.compile(rf"^ {{0,4}}({'|'.join(COLOURS)})(?=\W|$)")
# where a line goes on that is too long: below its last column, by what it begins with
BELOW = {
    r"(?:NOT FIXED|NOT READ|OFF|off by default|fixed|faster) +(?:auto|\S.{14,16} )": 28,
    r" {28}\w": 28,
    r" {10}\w": 21,
    r"(?:affected|latent|fixed|absent|unknown) ": 10,
    r" {4}\w": 16,
}
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
    indent = next((column for begins, column in BELOW.items() if re.match(begins, line)), 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def paint(line: str) -> str:
    state = STATE.match(line)
    if state is None:
        return line
    start, end = state.span(1)
    return f"{line[:start]}\033[{COLOURS[state[1]]}m{line[start:end]}\033[0m{line[end:]}"
