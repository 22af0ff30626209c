# SPDX-License-Identifier: Apache-2.0
"""Servers that were run with a model on a release, stock and with the plugin: evidence for people, from served.json.

A fork may have the version of a release, so this counts only where nothing of the source is unread.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

FILE = pathlib.Path(__file__).with_suffix(".json")
CPU, GPU, GRAPHS = "cpu", "gpu", "graphs"
# how a server answered, with breakable prefill graphs asked for, beside itself without a replay
RIGHT, WRONG, EAGER, ENDS = "right", "wrong", "without graphs", "no start or end"
# when SGLang makes breakable prefill graphs of a model
BY_DEFAULT, IF_ASKED_FOR, NEVER = "by default", "if asked for", "never"


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def graphs(release: str, architectures: Sequence[str]) -> str:
    """When SGLang makes prefill graphs of such a model, or nothing where that is not recorded."""
    rows = table().get(release, {}).get(GRAPHS, {})
    return next((word for word, names in rows.items() for name in architectures if name in names), "")


def on_cpu(release: str, architectures: Sequence[str]) -> tuple[str, str] | None:
    """The answers of a stock and of a patched server on a CPU."""
    for words, names in table().get(release, {}).get(CPU, {}).items():
        if set(architectures) & set(names):
            stock, patched = words.split(", ")
            return stock, patched
    return None


def on_gpu(release: str, architectures: Sequence[str]) -> tuple[int, int, int] | None:
    """The requests to servers on a GPU, and those that a stock and a patched one answered right."""
    rows = table().get(release, {}).get(GPU, {})
    return next((tuple(rows[name]) for name in architectures if name in rows), None)
