# SPDX-License-Identifier: Apache-2.0
"""Other holders of a replaced function: copies that follow, tables and closures that cannot."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Iterable
from typing import Any

from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.slots import MISSING, WRAPPED, Change, PatchError, Slot, core, sglang_modules
from sglang_bcg_fixes.engine.wrappers import MARK, is_empty

# in the globals of every module, and most of all that these hold
BUILTINS = vars(builtins)


def rebind_copies(old: Any, new: Any, done: list[Change]) -> None:
    """Follow `from X import Y` into every module of SGLang."""
    for module in sglang_modules():
        for name, value in list(vars(module).items()):
            if value is old:
                slot = Slot(f"{module.__name__}:{name}", module, name)
                done.append(Change(slot, old, new))
                slot.put(new)


def refuse_stale_holders(changes: list[Change]) -> None:
    """Raise when a table, class, partial or closure of SGLang still holds a function that was replaced.

    The changes are those of any number of fixes in the order of time. All that SGLang has imported is walked, once.
    """
    # of several that replaced the same function, the first
    replaced = {id(core(change.before)): change for change in reversed(changes) if change.before is not MISSING}
    if not replaced:
        return
    for module in sglang_modules():
        for name, value in list(vars(module).items()):
            for item in held_by(value, module.__name__):
                function = core(item) if issubclass(type(item), WRAPPED) else item
                if id(function) in replaced:
                    raise stale(f"{module.__name__}:{name}{path_to(item, value)}", replaced[id(function)])
    # SGLang no longer has what a later fix replaced, but that fix goes on to call it
    for change in changes:
        for item in (change.before, *held_by(change.before, "")):
            earlier = replaced.get(id(core(item)))
            if earlier and earlier.number < change.number and owner(earlier) != owner(change):
                raise stale(f"{change.slot.where} inside fix {owner(change)}", earlier)


def stale(where: str, change: Change) -> PatchError:
    return PatchError(f"{where} still holds the old {change.slot.where}; declare it in `aliases`, or patch it itself")


def owner(change: Change) -> str:
    return str(getattr(core(change.after), MARK))


def held_by(value: Any, module_name: str) -> Iterable[Any]:
    """List what a module-level name holds one level down.

    Nothing of the value is asked for but what its type is known to have: SGLang keeps objects that import whole
    packages at the first attribute, and mappings that do at the first item.
    """
    kind = type(value)
    if issubclass(kind, type):
        return list(vars(value).values()) if vars(value).get("__module__") == module_name else ()
    if issubclass(kind, dict):
        # one of the modules is enough for what all of them have
        return list(dict.values(value)) if value is not BUILTINS or module_name == "sglang" else ()
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    if kind is functools.partial:
        return (value.func,)
    function = graph_break.graph_call(value)
    # our own wrappers hold the original on purpose
    if type(function) is types.FunctionType and function.__closure__ and MARK not in vars(function):
        return [cell.cell_contents for cell in function.__closure__ if not is_empty(cell)]
    return ()


def path_to(item: Any, value: Any) -> str:
    """The path to what `held_by` found in a value; the repr of a key is foreign code, called only here."""
    kind = type(value)
    if issubclass(kind, type):
        return next(f".{name}" for name, held in vars(value).items() if held is item)
    if issubclass(kind, dict):
        return next(f"[{key!r}]" for key, held in dict.items(value) if held is item)
    if issubclass(kind, list | tuple):
        items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        return next(f"[{index}]" for index, held in enumerate(items) if held is item)
    return ".func" if kind is functools.partial else "'s closure"
