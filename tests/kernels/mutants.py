# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tables of wrong kernels: change one line of a module, and tell if that is noticed."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests import processes


class NothingToChange(Exception):
    """The text that a mutant would change is not there any more."""


def changed(original: types.ModuleType, old: str, new: str, folder: pathlib.Path, name: str = "mutant") -> Any:
    """The module with other text in the place of some of its own, which may be imported by this name."""
    text = pathlib.Path(str(original.__file__)).read_text()
    if old not in text:
        raise NothingToChange(f"{original.__file__} has no {old!r} to change")
    # triton reads the source of its kernels from a file
    file = folder / f"{name}.py"
    file.write_text(text.replace(old, new))
    # dataclasses look their module up
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    return module


def on(mutant: types.ModuleType, original: types.ModuleType, user: types.ModuleType, folder: pathlib.Path) -> Any:
    """The module that uses `original`, with the mutant in its place."""
    return changed(user, f"from {original.__name__} import", f"from {mutant.__name__} import", folder, "user")


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
            try:
                fate = str(noticed(name, pathlib.Path(folder)))
            except NothingToChange as reason:
                # told as well: a process that dies without a word has noticed
                fate = str(reason)
            print(name, fate, sep="\t", flush=True)


def fates(module: str, names: Sequence[str]) -> dict[str, bool]:
    """The fate of each mutant, in a process of this module that may die of its memory accesses."""
    found: dict[str, bool] = {}
    while len(found) < len(names):
        left = [name for name in names if name not in found]
        done = processes.python("-m", module, *left, environment={"TRITON_INTERPRET": "1"}, timeout=300)
        ready, *lines = done.stdout.splitlines() or [""]
        assert ready == "ready", done.stderr[-3000:]
        told = dict(line.split("\t") for line in lines)
        assert set(told.values()) <= {"True", "False"}, told
        found |= {name: result == "True" for name, result in told.items()}
        if len(told) < len(left):
            # the memory that a mutant has spoilt may be python's own; an exception is no such death. What dies after
            # the last one has told of all
            assert done.returncode < 0, done.stderr[-3000:]
            found[left[len(told)]] = True
    return found
