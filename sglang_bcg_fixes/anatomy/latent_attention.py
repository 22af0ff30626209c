# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): code that chooses its form, made to choose as under a piecewise graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.engine import graph_break, wrappers
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.source.tree import Source, absent, affected, drifted, fixed

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
# every other backend asks one of these, or is registered under its own name and asks none
CHOOSE = {
    f"{HANDLERS}:_handle_attention_backend": (),
    f"{HANDLERS}:handle_attention_trtllm_mla": (f"{HANDLERS}:AttentionBackendRegistry._handlers['trtllm_mla']",),
    f"{HANDLERS}:handle_attention_triton": (f"{HANDLERS}:AttentionBackendRegistry._handlers['triton']",),
}
# what has to be in place where a release is affected
CHOOSES_THE_FORM, PREPARES_THE_FORM = "mla_dispatch_unaware", "mla_replay_prepared_as_mha"
# only where a replay is prepared for one of the forms
RESTORE = f"{PREFILL}._restore_mha_capture_state"
PREPARES = (RESTORE, f"{PREFILL}.load_batch")
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


def why_not_captured(model_runner: Any) -> Iterator[str]:
    """List the reasons why a replay of latent attention that asks SGLang's handlers would be wrong, or is untried."""
    backend = model_runner.prefill_attention_backend_str
    if backend != "fa3":
        yield f"latent attention on {backend}, which nobody has tried"
    runner: Any = getattr(sys.modules.get(PREFILL_MODULE), PREFILL.partition(":")[2], None)
    if hasattr(runner, RESTORE.rpartition(".")[2]):
        load = runner.load_batch
        if reads(load, "mla_pinned_under_bcg") and PREPARES_THE_FORM not in wrappers.fixes_in(load):
            yield f"without {PREPARES_THE_FORM} latent attention would be replayed in a form that is not captured"
    elif not is_chosen_by(CHOOSES_THE_FORM):
        yield f"without {CHOOSES_THE_FORM} latent attention is captured in a form that cannot be"


def reads(function: Any, name: str) -> bool:
    """Tell whether this function, or what it is put round, has an attribute of this name in it."""
    codes = (getattr(value, "__code__", None) for value in wrappers.layers(function))
    return any(name in code.co_names for code in codes if code is not None)


def judge_chooser(source: Source, choose: Definition, expanded: str, *further: str) -> Finding:
    """Judge code that may answer the expanded form while a graph is captured.

    `expanded` is how it says that, and `further` is what a fix needs beside it where it does.
    """
    if "is_in_breakable_cuda_graph" in choose.calls:
        return fixed("it asks for a breakable graph before it chooses", choose)
    if source.find(RESTORE) is None:
        return absent("no replay is prepared for a form of latent attention", choose)
    load = source.need(f"{PREFILL}.load_batch")
    if not load.mentions("self.has_mha_companion_layers"):
        return drifted("replays are prepared", choose, load)
    if not load.mentions("self.has_mha_companion_layers and (not is_cuda())"):
        return absent("replays are prepared for the expanded form, which is captured", choose, load)
    if not choose.mentions(expanded):
        return drifted("it chooses", choose, load)
    reason = "the expanded form is captured, and on CUDA replays are prepared for the absorbed one"
    return affected(reason, choose, load, *map(source.need, further))
