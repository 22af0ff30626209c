# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M3 answers wrongly or dies (explicit breakable prefill graphs)

Symptom: MiniMax-M3 with breakable prefill graphs answers wrongly with HTTP 200, or the server dies with "illegal memory
access". Only with --cuda-graph-backend-prefill breakable: the default for this model is another backend.
Cause: RadixAttention.forward has a separate branch for sparse layers, and under a breakable graph that branch calls the
attention backend directly. Capture freezes the metadata, the grid sizes and the host's lengths of the dummy batch, and
every replay attends as if one request had filled the whole bucket.
Change: While breakable prefill graphs are captured, a sparse layer takes the operation that this SGLang has for
compiled prefill, which narrows to the real tokens and zeroes the padded tail, as an eager break made by the installed
release's eager_on_graph. Outside the capture every layer is SGLang's own: a call costs nothing.
Remove when: No release before 0.5.22 has to be served.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.forward_batch import breakable_context, prefill_batch
from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, MINIMAX_M3
from sglang_bcg_fixes.anatomy.runners import PREFILL, makes_breakable_graphs
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.radix_attention"
FORWARD = f"{MODULE}:RadixAttention.forward"
OPERATION = "unified_sparse_attention_with_output"
BREAKS = (f"breakable_{OPERATION}", "RadixAttention._eager_attention")
MODEL = "sglang.srt.models.minimax_m3"


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("this release has no MiniMax-M3")
    forward = source.need(FORWARD)
    for name in BREAKS:
        if forward.mentions(name.rpartition(".")[2]) and source.is_graph_break(MODULE, name):
            return fixed(f"sparse layers call {name}, which is a graph break", forward, source.need(f"{MODULE}:{name}"))
    operation = source.need(f"{MODULE}:{OPERATION}")
    decorator = source.need(*(f"{module}:eager_on_graph" for module in graph_break.DECORATOR_MODULES))
    if forward.mentions("return get_attn_backend().forward(q, k, v, self, forward_batch, save_kv_cache, **kwargs)"):
        return affected(
            "under a breakable graph sparse layers call the backend directly", forward, operation, decorator
        )
    return drifted("sparse layers reach the backend", forward, operation)


def capture_with_breaks(original: Callable[..., None], self: Any) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    with contextlib.ExitStack() as stack:
        for layer in self.model_runner.model.modules() if makes_breakable_graphs(self) else ():
            if isinstance(layer, RadixAttention):
                broken = functools.partial(break_round_sparse_attention, layer.forward, layer)
                stack.enter_context(replaced(layer, "forward", broken))
        original(self)


def break_round_sparse_attention(
    original: Callable[..., Any],
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if kwargs.get("idx_q") is None or not is_in_a_breakable_prefill(forward_batch):
        return original(q, k, v, forward_batch, save_kv_cache, *args, **kwargs)
    index_query = kwargs["idx_q"]
    output = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
    index_output = q.new_empty((q.shape[0], index_query.shape[1] * index_query.shape[2]))
    as_break()(
        q,
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        output,
        index_output,
        index_query,
        kwargs["idx_k"],
        save_kv_cache,
        layer.layer_id,
        idx_v=kwargs.get("idx_v"),
    )
    return index_output, output


def is_in_a_breakable_prefill(forward_batch: Any) -> bool:
    import torch

    # compiled prefill is traced through here, and has no breaks
    if torch.compiler.is_compiling() or not breakable_context().is_in_breakable_cuda_graph():
        return False
    return prefill_batch() is not None and bool(forward_batch.forward_mode.is_extend())


@functools.cache
def as_break() -> Callable[..., None]:
    from sglang.srt.layers import radix_attention

    broken: Callable[..., None] = graph_break.decorate(getattr(radix_attention, OPERATION), None)
    return broken


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{PREFILL}.capture",), How.AROUND, capture_with_breaks),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(MINIMAX_M3, ASKED_FOR),
)
