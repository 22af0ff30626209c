# SPDX-License-Identifier: Apache-2.0
"""A plugin that puts functions of its own in the place of SGLang's, by its hooks, and calls what it found at import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.other_plugins import calls
from tests.other_plugins.runner import FORWARD, LOAD_BATCH


def original(target: str) -> Callable[..., Any]:
    module, owner, method = target.rsplit(".", 2)
    function: Callable[..., Any] = getattr(getattr(importlib.import_module(module), owner), method)
    return function


# SGLang imports each plugin before it calls the first
FOUND = {target: original(target) for target in (FORWARD, LOAD_BATCH)}


def replacing(found: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls["replacement"] += 1
        return found(*args, **kwargs)

    return replacement


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookType, plugin_hook

    for target, found in FOUND.items():
        plugin_hook(target, type=HookType.REPLACE)(replacing(found))
