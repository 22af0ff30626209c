# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tables of wrong kernels: change one line of a module, and tell if that is noticed."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from typing import Any


def changed(original: types.ModuleType, old: str, new: str, folder: pathlib.Path) -> Any:
    """The module with other text in the place of some of its own."""
    text = pathlib.Path(str(original.__file__)).read_text()
    assert old in text, f"{original.__file__} has no {old!r} to change"
    # triton reads the source of its kernels from a file
    file = folder / "mutant.py"
    file.write_text(text.replace(old, new))
    # dataclasses look their module up
    module = sys.modules["mutant"] = types.ModuleType("mutant")
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    return module


def is_noticed(faults: Callable[[], list[Any]]) -> bool:
    try:
        return faults() != []
    except Exception:
        # the interpreter refuses what is not Triton any more
        return True


def tell(names: Iterable[str], noticed: Callable[[str, pathlib.Path], bool]) -> None:
    for name in names:
        # a folder for each: python keeps the lines of a file that it has read
        with tempfile.TemporaryDirectory() as folder:
            print(name, noticed(name, pathlib.Path(folder)), sep="\t", flush=True)
