# SPDX-License-Identifier: Apache-2.0
"""One file with everything that a report about this plugin needs, and nothing that is somebody's secret."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import doctor
from sglang_bcg_fixes.lab.verify import environment

FORMAT = 1
OURS = "bcg-fixes"
# the end of a log, as far as somebody will read
LINES, LENGTH = 2000, 2000
# flags whose words are a choice or a size; the words of all others may be names, addresses or keys, numbers too
CHOICES = "backend|algorithm|strategy|dtype|policy"
SIZES = "size|topk|steps|tokens|requests|length|interval|static|bs|tp|dp"
TOLD = re.compile(rf"-({CHOICES}|{SIZES})(-prefill|-decode)?$")
# of a server's report: what it is, and not what it was called with
OF_A_PROCESS = (
    *("package", "sglang", "process", "title", "time", "seconds", "plan", "read_back", "selfcheck", "canary"),
    *("batches", "fixes", "kernels"),
)


class ReportFileError(Exception):
    """The file cannot be written, and what to do."""


def made(
    examined: doctor.Examination | None, live: Sequence[dict[str, Any]], notes: Sequence[str], logs: Iterable[str]
) -> dict[str, Any]:
    content = {
        **environment.header(environment.look(sys.executable)),
        "format": FORMAT,
        "platform": platform.platform(),
        "settings": flags.of_ours(),
        "other_settings": flags.names_of_others(),
        "doctor": examined.as_dict() if examined else None,
        "processes": [process(each) for each in live],
        "notes": list(notes),
        "log": list(logs),
    }
    found: dict[str, Any] = without_home(content)
    return found


def process(content: dict[str, Any]) -> dict[str, Any]:
    found = {name: content[name] for name in OF_A_PROCESS if name in content}
    return {**found, "flags": list(flags_of(content.get("argv", ())))}


def flags_of(words: Sequence[str]) -> Iterator[str]:
    """The flags of a command, with their words where these are a size or a choice."""
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            yield f"{name}={value if is_told(name, value) else '...'}" if value else name
        elif name:
            yield word if is_told(name, word) else "..."


def is_told(name: str, word: str) -> bool:
    return bool(TOLD.search(name) and re.fullmatch(r"[\w.+-]{1,40}", word))


def lines_of_ours(file: pathlib.Path) -> list[str]:
    with file.open(errors="replace") as lines:
        return [line.rstrip()[:LENGTH] for line in lines if OURS in line][-LINES:]


def without_home(value: Any) -> Any:
    """The same without the name of this user's folder."""
    home = os.path.expanduser("~").rstrip("/")
    if not home:
        return value
    return json.loads(json.dumps(value).replace(json.dumps(home)[1:-1], "~"))


def write(file: pathlib.Path, content: dict[str, Any]) -> None:
    """For this user alone: whoever sends it has looked at it first."""
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ReportFileError(f"{file} is there already; name another with --file, or remove it") from error
    with os.fdopen(number, "w") as opened:
        json.dump(content, opened, indent=1)
        opened.write("\n")
