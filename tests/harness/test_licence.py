# SPDX-License-Identifier: Apache-2.0
"""Every source file names its licence in its first two lines, as tools that collect licences expect."""

from __future__ import annotations

import pathlib

import pytest

from tests import processes

FOLDERS = ("benchmarks", "cpu_sglang", "csrc", "examples", "sglang_bcg_fixes", "tests", "tools")
SUFFIXES = {".py", ".cuh", ".hpp", ".c"}
LINE = "SPDX-License-Identifier: Apache-2.0"


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and "__pycache__" not in file.parts]
    return [file for file in files if file.read_text().strip()]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_names_its_licence(folder: str) -> None:
    found = sources(processes.REPOSITORY / folder)
    assert found
    assert not [str(file) for file in found if not any(LINE in line for line in file.read_text().splitlines()[:2])]
