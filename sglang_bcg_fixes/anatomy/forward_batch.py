# SPDX-License-Identifier: Apache-2.0
"""The batch of the current capture or replay, and its padded rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.engine import graph_break, slots

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT = (
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager:"
    "get_tc_piecewise_forward_context",
    "sglang.srt.compilation.piecewise_context_manager:get_forward_context",
)


def breakable_context() -> Any:
    return graph_break.load("context")


def prefill_batch() -> Any:
    """Return the batch of the prefill graph being captured or replayed, or None."""
    context = prefill_context()()
    return context and context.forward_batch


@functools.cache
def prefill_context() -> Callable[[], Any]:
    function: Callable[[], Any] = slots.locate(CONTEXT).own()
    return function


def is_captured_into_a_prefill_graph() -> bool:
    """False in warm-up, in decode graphs, and inside a break, where the stream is between two captures."""
    import torch

    # compiled prefill is traced through here, and has no breaks
    if torch.compiler.is_compiling():
        return False
    if not breakable_context().is_in_breakable_cuda_graph() or not torch.cuda.is_current_stream_capturing():
        return False
    return prefill_batch() is not None


def live_backend(batch: Any) -> Any:
    if hasattr(batch, "attn_backend"):
        return batch.attn_backend
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


def zero_behind_the_last_token(rows: Tensor) -> None:
    """Zero the rows after the operation's token count; None, as in some captures, means all rows count."""
    from sglang.srt.layers import radix_attention

    get_context = getattr(radix_attention, "get_tc_piecewise_forward_context", None)
    context = (get_context or radix_attention.get_forward_context)()
    real_tokens = context.forward_batch.num_token_non_padded_cpu
    if real_tokens is not None:
        rows[real_tokens:].zero_()
