# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): code that chooses its form, made to choose as under a piecewise graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.engine import graph_break, wrappers
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source, absent, affected, fixed, unknown

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
# every other backend asks one of these, or is registered under its own name and asks none
CHOOSE = {
    f"{HANDLERS}:_handle_attention_backend": (),
    f"{HANDLERS}:handle_attention_trtllm_mla": (f"{HANDLERS}:AttentionBackendRegistry._handlers['trtllm_mla']",),
    f"{HANDLERS}:handle_attention_triton": (f"{HANDLERS}:AttentionBackendRegistry._handlers['triton']",),
}
TENSORRT_PLAN = "sglang.srt.layers.attention.trtllm_mla_backend:TRTLLMMLABackend.init_forward_metadata"


def as_under_a_piecewise_graph(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not graph_break.load("context").is_in_breakable_cuda_graph():
        return original(*args, **kwargs)
    with piecewise_scope()():
        return original(*args, **kwargs)


@functools.cache
def piecewise_scope() -> Any:
    try:
        from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
            enable_tc_piecewise_cuda_graph as scope,
        )
    except ModuleNotFoundError:
        from sglang.srt.compilation.piecewise_context_manager import enable_piecewise_cuda_graph as scope
    return scope


def is_chosen_by(fix_id: str) -> bool:
    """Tell whether capture and replay choose the absorbed form in this process."""
    handlers = sys.modules.get(HANDLERS)
    choosers = [getattr(handlers, where.partition(":")[2], None) for where in CHOOSE]
    return all(fix_id in wrappers.fixes_in(chooser) for chooser in choosers)


def judge_chooser(source: Source, choose: Definition, expanded: str, *further: str) -> Finding:
    """Judge code that may answer the expanded form while a graph is captured.

    `expanded` is how it says that, and `further` is what a fix needs beside it where it does.
    """
    if "is_in_breakable_cuda_graph" in choose.calls:
        return fixed("it asks for a breakable graph before it chooses", choose)
    if source.find(f"{PREFILL}._restore_mha_capture_state") is None:
        return absent("no replay is prepared for a form of latent attention", choose)
    load = source.need(f"{PREFILL}.load_batch")
    if not load.mentions("self.has_mha_companion_layers"):
        return unknown("replays are prepared in a way that no known release does", choose, load)
    if not load.mentions("self.has_mha_companion_layers and (not is_cuda())"):
        return absent("replays are prepared for the expanded form, which is captured", choose, load)
    if not choose.mentions(expanded):
        return unknown("it chooses in a way that no known release does", choose, load)
    reason = "the expanded form is captured, and on CUDA replays are prepared for the absorbed one"
    return affected(reason, choose, load, *map(source.need, further))
