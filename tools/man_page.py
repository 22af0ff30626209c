# SPDX-License-Identifier: Apache-2.0
"""The manual page of `bcg-fixes`, from the parser that reads its words and the table of flags; for make_docs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import main

DESCRIPTION = (
    "Tells which known defects an SGLang has, what this package mends there, and what running servers have. A server "
    "needs no command: SGLang loads the plugin by itself."
)
EXAMPLES = (
    ("bcg-fixes doctor --model FOLDER -- --tp-size 2", "what concerns this model with these flags"),
    ("bcg-fixes doctor --release 0.5.23", "everything that a release has, installed or not"),
    ("SGLANG_PLUGINS=bcg_fixes sglang serve ...", "a server with the plugin"),
    ("bcg-fixes status", "what that server really has"),
)
FILES = (
    (
        "$XDG_RUNTIME_DIR/sglang-bcg-fixes, /tmp/sglang-bcg-fixes-UID",
        f"reports of processes, unless {flags.REPORT_DIR}",
    ),
    ("~/.cache/sglang-bcg-fixes", f"fetched wheels, unless {flags.CACHE_DIR}"),
)


def page(rows: Sequence[flags.Flag]) -> str:
    return "\n".join(lines_of(main.parser(), rows)) + "\n"


def lines_of(parser: argparse.ArgumentParser, rows: Sequence[flags.Flag]) -> Iterator[str]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    # without a date, so that the same version is the same page
    yield f'.TH BCG-FIXES 1 "" "sglang-bcg-fixes {__version__}" "User Commands"'
    title = (parser.description or "").rstrip(".")
    yield from (".SH NAME", f"bcg\\-fixes \\- {text(title[:1].lower() + title[1:])}")
    yield ".SH SYNOPSIS"
    for name, command in commands.choices.items():
        yield from (".br", usage(name, command))
    yield from (".br", ".B bcg\\-fixes \\-\\- \\fIMODULE\\fR [\\fIARGUMENTS\\fR ...]")
    yield from (".SH DESCRIPTION", text(DESCRIPTION), ".PP", text(parser.epilog or ""))
    yield from options_of(parser)
    yield ".SH COMMANDS"
    for name, command in commands.choices.items():
        yield from (f".SS {name}", sentence(helps[name]))
        if command.description:
            yield from (".PP", text(command.description))
        yield from options_of(command)
    yield from (".SH ENVIRONMENT", "Flags are read from the environment only.")
    yield "A flag of a fix or of a kernel takes these values."
    for value, meaning in flags.VALUES.items():
        yield from (".TP", f".I {text(value)}", sentence(meaning))
    for row in rows:
        yield from (
            ".TP",
            f"\\fB{text(row.name)}\\fR=\\fI{text(row.values)}\\fR",
            text(f"{row.doc} Default: {row.default}."),
        )
    yield ".SH FILES"
    for path, what in FILES:
        yield from (".TP", f".I {text(path)}", sentence(what))
    yield ".SH EXAMPLES"
    for command_line, what in EXAMPLES:
        yield from (".TP", f".B {text(command_line)}", sentence(what))


def usage(name: str, command: argparse.ArgumentParser) -> str:
    """A command's line of the synopsis; its options are listed below."""
    words = [f"\\fB{text(f'bcg-fixes {name}')}\\fR"]
    takes = [action for action in command._actions if action.dest != "help"]
    if any(action.option_strings for action in takes):
        words.append("[\\fIoptions\\fR]")
    return " ".join([*words, *(positional(action) for action in takes if not action.option_strings)])


def positional(action: argparse.Action) -> str:
    dashes, _, name = (action.metavar if isinstance(action.metavar, str) else choices(action)).rpartition(" ")
    word = f"{text(dashes)} \\fI{text(name)}\\fR".strip()
    return {"*": f"[{word} ...]", "+": f"{word} ..."}.get(str(action.nargs), word)


def choices(action: argparse.Action) -> str:
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def options_of(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if action.dest in ("help", "command"):
            continue
        value = action.metavar if isinstance(action.metavar, str) else choices(action)
        takes = f" \\fI{text(value)}\\fR" if action.nargs != 0 else ""
        named = ", ".join(f"\\fB{text(option)}\\fR{takes}" for option in action.option_strings)
        yield from (".TP", named or positional(action))
        # a default or a choice may stand in it
        yield sentence(command._get_formatter()._expand_help(action) if action.help else "")


def sentence(words: str) -> str:
    return f"{text(words[:1].upper() + words[1:]).rstrip('.')}." if words else ""


def text(words: str) -> str:
    """Words as they are, for roff: one line, in which nothing is a request."""
    escaped = " ".join(words.split()).replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped)
