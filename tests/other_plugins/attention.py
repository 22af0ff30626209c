# SPDX-License-Identifier: Apache-2.0
"""A plugin that sets its own wrappers around attention, as soon as it is loaded and without SGLang's hooks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tests.other_plugins import calls

LAYERS = "sglang.srt.layers"
HYBRID = f"{LAYERS}.attention.hybrid_linear_attn_backend"
RADIX = f"{LAYERS}.radix_attention"
BREAK = "breakable_unified_attention_with_output"
METHODS = (
    (RADIX, "RadixAttention", "forward"),
    (HYBRID, "Mamba2AttnBackend", "forward"),
    (HYBRID, "Mamba2AttnBackend", "init_forward_metadata"),
)


def counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls["attention"] += 1
        return original(*args, **kwargs)

    return wrapper


def load() -> None:
    for module, name, method in METHODS:
        owner = getattr(importlib.import_module(module), name)
        setattr(owner, method, counted(getattr(owner, method)))
    attention = importlib.import_module(RADIX)
    # of early releases
    if hasattr(attention, BREAK):
        setattr(attention, BREAK, counted(getattr(attention, BREAK)))
