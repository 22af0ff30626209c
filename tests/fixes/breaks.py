# SPDX-License-Identifier: Apache-2.0
"""SGLang while it captures a breakable graph, with breaks that a test replays."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy import forward_batch
from sglang_bcg_fixes.engine import graph_break

Replays = list[Callable[[], Any]]


def kept(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Say that SGLang captures, and return the list that each break adds its replay to."""
    replays: Replays = []

    def decorate(inner: Callable[..., Any], stub: None) -> Callable[..., None]:
        def broken(*args: Any, **kwargs: Any) -> None:
            replays.append(lambda: inner(*args, **kwargs))
            replays[-1]()

        return broken

    monkeypatch.setattr(graph_break, "decorate", decorate)
    context = types.SimpleNamespace(is_in_breakable_cuda_graph=lambda: True)
    monkeypatch.setattr(forward_batch, "breakable_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return replays
