# SPDX-License-Identifier: Apache-2.0
"""A header is compiled for the host once, and again when anything about it is another."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes import flags
from tests.kernels import on_host

pytestmark = pytest.mark.skipif(not on_host.compiler(), reason="no g++ here")

Build = Callable[[], int]


@pytest.fixture
def header(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(flags.CACHE_DIR, str(tmp_path / "cache"))
    (tmp_path / "included.cuh").write_text("constexpr int NUMBER = 3;")
    file = tmp_path / "kernels.cuh"
    file.write_text('#include "included.cuh"\n#define MORE 0\nextern "C" int number() { return NUMBER + MORE; }')
    return file


@pytest.fixture
def number(header: pathlib.Path, tmp_path: pathlib.Path) -> Build:
    return lambda: int(on_host.build(header, {}, tmp_path).number())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List what has been compiled, and not only read."""
    found: list[str] = []
    compile_with = on_host.compile_with

    def counted(*arguments: str) -> str:
        found.extend(arguments[-1:] if arguments[-2:-1] == ("-o",) and arguments[-1].endswith(".so") else ())
        return compile_with(*arguments)

    monkeypatch.setattr(on_host, "compile_with", counted)
    return found


def test_it_is_compiled_once(number: Build, compiled: list[str]) -> None:
    assert [number(), number()] == [3, 3]
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [("kernels.cuh", "MORE 0", "MORE 1", 4), ("included.cuh", "NUMBER = 3", "NUMBER = 5", 5)],
)
def test_another_text_is_another_library(
    number: Build, compiled: list[str], header: pathlib.Path, file: str, old: str, new: str, found: int
) -> None:
    assert number() == 3
    changed = header.parent / file
    changed.write_text(changed.read_text().replace(old, new))
    assert number() == found
    assert len(compiled) == 2


@pytest.mark.parametrize("options", ("OPTIONS", "CHECKS"))
def test_other_options_make_another_library(
    number: Build, compiled: list[str], monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    number()
    monkeypatch.setattr(on_host, options, (*getattr(on_host, options), "-DUNUSED"))
    number()
    assert len(compiled) == 2


def test_the_last_ones_are_kept(
    number: Build, compiled: list[str], header: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(on_host, "MOST_KEPT", 2)
    for value in range(4):
        header.write_text(f'extern "C" int number() {{ return {value}; }}')
        assert number() == value
    # and the one that was being made
    assert len(list((tmp_path / "cache" / "on_host").iterdir())) <= 3
    assert number() == 3 and len(compiled) == 4
