# SPDX-License-Identifier: Apache-2.0
"""Checks of what a package contributes, before anything relies on its types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_fixes.concern import Concern, Condition
from sglang_bcg_fixes.model import Fix, How, Impl, Kernel, PatchPoint, Retired, Workaround

# the words for what a field must be, and its check
Wanted = tuple[str, Callable[[Any], bool]]


def is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]*", value) is not None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_place(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+:\S.*", value) is not None


def is_flag(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("SGLANG_BCG_[A-Z0-9_]+", value) is not None


def is_version(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\d+\.\d+", value) is not None


def many(words: str, is_right: Callable[[Any], bool]) -> Wanted:
    """A tuple or list of these; a string does not count, though Python iterates it too."""
    return f"a tuple of {words}", lambda value: isinstance(value, tuple | list) and all(map(is_right, value))


def one(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


NAME: Wanted = ("a name such as wrong_answer", is_name)
TEXT: Wanted = ("a text", is_text)
VERSION: Wanted = ("a version such as 1.2", is_version)
MAPPING: Wanted = ("a mapping", one(Mapping))
FUNCTION: Wanted = ("a function", callable)
BODY: Wanted = (
    "a function, or its place such as package.module:name",
    lambda value: callable(value) or is_place(value),
)
FIELDS: Mapping[type, Mapping[str, Wanted]] = {
    Fix: {
        "id": NAME,
        "doc": TEXT,
        "upstream": many("links", is_text),
        "probe": FUNCTION,
        "known": MAPPING,
        "patches": many("PatchPoint", one(PatchPoint)),
        "workarounds": many("Workaround", one(Workaround)),
        "default": ("auto, off or on", lambda value: value in ("auto", "off", "on")),
        "after": many("ids", is_name),
        "verify": many("texts", is_text),
        "concerns": many("Concern", one(Concern)),
        "measured": many("Condition", one(Condition)),
    },
    Kernel: {
        "op": NAME,
        "doc": TEXT,
        "impls": many("Impl", one(Impl)),
        "probe": FUNCTION,
        "known": MAPPING,
        "patches": many("PatchPoint", one(PatchPoint)),
        "bit_exact": ("True or False", one(bool)),
        "awaits": many("modules", is_text),
        "concerns": many("Concern", one(Concern)),
    },
    PatchPoint: {
        "where": many("places such as package.module:Name", is_place),
        "how": ("a How", one(How)),
        "body": BODY,
        "aliases": many("places", is_place),
        "needed": FUNCTION,
        "asked": ("True, False or None", lambda value: value in (True, False, None)),
    },
    Retired: {
        "name": ("a name such as SGLANG_BCG_FIX_WRONG_ANSWER", is_flag),
        "since": VERSION,
        "refused_from": VERSION,
        "why": TEXT,
        "now": ("a text", one(str)),
    },
    Workaround: {"flags": TEXT, "option": TEXT, "effect": TEXT},
    Impl: {
        "name": TEXT,
        "accepts": FUNCTION,
        "module": TEXT,
        "only_by_name": ("a text", one(str)),
        "measured_on": many("texts", is_text),
    },
}


def fault(item: Any, kind: type) -> str | None:
    """Describe the first field that is wrong, or return None."""
    if not isinstance(item, kind):
        return f"it declares {shown(item)}, which is not a {kind.__name__}"
    for name, (words, is_right) in FIELDS[kind].items():
        value = getattr(item, name)
        if not is_right(value):
            return f"its {kind.__name__}'s {name} is {shown(value)}, not {words}"
        for inner in value if isinstance(value, tuple | list) else ():
            below = fault(inner, type(inner)) if type(inner) in FIELDS else None
            if below:
                return below
    return None


def shown(value: Any) -> str:
    """A short form to find it by; its repr is the package's own code and may raise."""
    try:
        return f"{value!r:.60}"
    except Exception as error:
        return f"a {type(value).__name__} without a repr ({type(error).__name__})"
