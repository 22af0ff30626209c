# SPDX-License-Identifier: Apache-2.0
"""Statements of pages about commands and code, where the subject has no test with the same statement."""

from __future__ import annotations

import argparse
import pathlib
import re

import pytest

from sglang_bcg_fixes.cli import main
from tests import processes

DOCS = processes.REPOSITORY / "docs"
PACKAGE = processes.REPOSITORY / "sglang_bcg_fixes"
ROOMS = ("anatomy", "cli", "engine", "planning", "process", "source")
CONTRIBUTING = (processes.REPOSITORY / "CONTRIBUTING.md").read_text()
MAP = CONTRIBUTING.partition("\n## Map of the code\n")[2].partition("\n## ")[0]
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", MAP))))


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
