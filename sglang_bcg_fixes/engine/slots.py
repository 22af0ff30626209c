# SPDX-License-Identifier: Apache-2.0
"""Places that hold a function, found by name, and what stands there."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import sys
import types
from typing import Any

MISSING = object()
# the kinds that have a function inside
WRAPPED = (staticmethod, classmethod, property)


class PatchError(Exception):
    """A patch point that cannot be changed or restored, and why."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place that holds a function: an attribute of a module or class, or an item of a dictionary."""

    where: str
    owner: Any
    name: Any
    is_item: bool = False

    def own(self) -> Any:
        """The value itself, unbound and not inherited."""
        return (self.owner if self.is_item else vars(self.owner)).get(self.name, MISSING)

    def raw(self) -> Any:
        """The value or the inherited one, without the binding that attribute access does."""
        if self.own() is MISSING and isinstance(self.owner, type):
            return next((vars(base)[self.name] for base in self.owner.__mro__ if self.name in vars(base)), MISSING)
        return self.own()

    def today(self) -> Any:
        """The value that SGLang finds there now: its class or table may have been replaced since."""
        module, _, path = self.where.partition(":")
        slot = slot_in(sys.modules.get(module, MISSING), self.where, path)
        return MISSING if slot is None else slot.raw()

    def put(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.owner, self.name)
        elif self.is_item:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclasses.dataclass(frozen=True)
class Change:
    """One changed slot, which keeps the original: a module global would be rebound like any other."""

    slot: Slot
    before: Any
    after: Any
    # in the order of time: changes of several fixes come off in reverse
    number: int = dataclasses.field(default_factory=itertools.count().__next__)


def sglang_modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if (name == "sglang" or name.startswith("sglang.")) and issubclass(type(module), types.ModuleType)
    ]


def locate(alternatives: tuple[str, ...]) -> Slot:
    """The first of the alternatives that exists."""
    missing = []
    for where in alternatives:
        module_name, _, path = where.partition(":")
        try:
            owner = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            missing.append(f"no module {error.name}")
            continue
        slot = slot_in(owner, where, path)
        if slot:
            return slot
        missing.append(f"no {where}")
    raise PatchError("; ".join(missing))


def slot_in(module: Any, where: str, path: str) -> Slot | None:
    """The place in a module; of an item only the table has to be there."""
    path, key = split_item(path)
    *scopes, name = path.split(".")
    owner = module
    for scope in scopes:
        owner = getattr(owner, scope, MISSING)
    slot = Slot(where, owner, name)
    if owner is MISSING or slot.raw() is MISSING:
        return None
    return slot if key is None else Slot(where, slot.raw(), key, is_item=True)


def split_item(path: str) -> tuple[str, Any]:
    """Split "TABLE['key']" into ("TABLE", "key"), and a plain path into itself and None."""
    if not path.endswith("]"):
        return path, None
    name, _, key = path.removesuffix("]").partition("[")
    return name, ast.literal_eval(key)


def core(value: Any) -> Any:
    """The function inside a staticmethod, classmethod or property; other values as they are."""
    # not isinstance, which may read __class__: a lazy proxy then imports what it stands for
    kind = type(value)
    if issubclass(kind, staticmethod | classmethod):
        return value.__func__
    return value.fget if issubclass(kind, property) else value
