# SPDX-License-Identifier: Apache-2.0
"""Changes that another plugin makes to what this one has patched in the fake SGLang."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sglang.srt import target


def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> list[str]:
        return ["theirs"]

    return replacement


def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> list[Any]:
        return ["theirs", *original(*args, **kwargs)]

    return replacement


class Thing(target.Thing):
    def method(self, x: int) -> list[str]:
        return ["own"]


class CallingThing(target.Thing):
    def method(self, x: int) -> list[Any]:
        return ["own", *super().method(x)]


def change_function(change: Callable[[Callable[..., Any]], Any]) -> None:
    target.function = change(target.function)


def change_method(change: Callable[[Callable[..., Any]], Any]) -> None:
    target.Thing.method = change(target.Thing.method)


def replace_class() -> None:
    target.Thing = Thing


def replace_class_calling_it() -> None:
    target.Thing = CallingThing


def delete_function() -> None:
    del target.function


def wrap_twice() -> None:
    change_function(wrapped)
    change_function(wrapped)


CHANGES: dict[str, Callable[[], Any]] = {
    "replaced function": lambda: change_function(replaced),
    "replaced method": lambda: change_method(replaced),
    "replaced class": replace_class,
    "reloaded module": lambda: importlib.reload(target),
    "deleted function": delete_function,
    "wrapped function": lambda: change_function(wrapped),
    "wrapped method": lambda: change_method(wrapped),
    "wrapped twice": wrap_twice,
    "class that calls it": replace_class_calling_it,
    "partial": lambda: change_function(functools.partial),
    "lru_cache": lambda: change_function(functools.lru_cache),
    "default": lambda: change_function(lambda ours: lambda x, original=ours: original(x)),
}
