# SPDX-License-Identifier: Apache-2.0
"""Statements of pages about commands and code, where the subject has no test with the same statement."""

from __future__ import annotations

import argparse
import pathlib
import re

import pytest

from sglang_bcg_fixes.cli import main
from tests import processes, wheels

DOCS = processes.REPOSITORY / "docs"
PACKAGE = processes.REPOSITORY / "sglang_bcg_fixes"
ROOMS = ("anatomy", "cli", "engine", "planning", "process", "source")
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", (DOCS / "map.md").read_text()))))


@pytest.mark.parametrize(
    "folder", [*(PACKAGE / room for room in ROOMS), processes.REPOSITORY / "tools"], ids=lambda folder: folder.name
)
def test_the_map_names_every_module(folder: pathlib.Path) -> None:
    # `serve*` stands for three
    found = {file.stem for file in folder.glob("*.py") if not file.name.startswith(("_", "serve_"))}
    assert found and found - NAMED == set()


def test_the_page_of_doctor_names_every_command() -> None:
    (commands,) = (each for each in main.parser()._actions if isinstance(each, argparse._SubParsersAction))
    rows = re.findall(r"^\| `bcg-fixes (\w+)", (DOCS / "doctor.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(commands.choices)


def test_the_page_of_doctor_shows_what_is_said() -> None:
    (shown,) = re.findall(r"^```\n(affected .+?)^```$", (DOCS / "doctor.md").read_text(), re.MULTILINE | re.DOTALL)
    root = str(wheels.unpacked("0.5.12.post1"))
    assert shown in processes.python("-m", "sglang_bcg_fixes", "doctor", "--all", "--root", root).stdout
