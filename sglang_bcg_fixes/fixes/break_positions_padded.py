# SPDX-License-Identifier: Apache-2.0
"""Wrong answers with --dcp-size above 1 and prefill graphs on the Triton backend

Symptom: With --dcp-size above 1 and the Triton backend, a prefill that does not fill its graph leaves wrong keys and
values: every rank stores every token, several of them in one slot, and later answers are wrong. On 0.5.15 with default
prefill graphs; later releases turn them off for --dcp-size unless they are asked for.
Cause: The break narrows queries, keys, values and slots to the real tokens, but not the positions. When the number of
positions differs from the number of slots, the backend falls back to a mask of its own tokens in the batch, and the
batch of a replay has none.
Change: Within the break the batch has the positions of the real tokens, as in SGLang itself from 0.5.18.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_CONTEXT, PREFILL_GRAPHS, TRITON
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

MODULE = "sglang.srt.layers.radix_attention"
BREAK = f"{MODULE}:breakable_unified_attention_with_output"
NARROWING = "sglang.srt.layers.attention.graph_utils:attention_input_scope"
STORE = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._set_kv_buffer"


def probe(source: Source) -> Finding:
    operation = source.need(
        f"{MODULE}:RadixAttention._eager_attention",
        f"{MODULE}:_unified_attention_with_output_impl",
        f"{MODULE}:unified_attention_with_output",
    )
    if operation.assignment_to("forward_batch.positions"):
        return fixed("the break narrows the positions", operation)
    if NARROWING.rpartition(":")[2] in operation.calls:
        return fixed("the break narrows slots and positions alike", operation, source.need(NARROWING))
    if not source.has_option("--dcp-size"):
        return absent("this release has no decode context parallelism", operation)
    store = source.need(STORE)
    if store.mentions("forward_batch.positions.numel() == loc.numel()"):
        return affected("the break narrows the slots and not the positions", operation, source.need(BREAK), store)
    return drifted("the backend finds its own tokens", operation, store)


def run_with_real_positions(original: Callable[..., None], *args: Any, **options: Any) -> None:
    from sglang.srt.layers import radix_attention

    get_context = getattr(radix_attention, "get_tc_piecewise_forward_context", None)
    batch = (get_context or radix_attention.get_forward_context)().forward_batch
    positions, real_tokens = batch.positions, batch.num_token_non_padded_cpu
    if positions is None or real_tokens is None:
        return original(*args, **options)
    batch.positions = positions[:real_tokens]
    try:
        original(*args, **options)
    finally:
        batch.positions = positions


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((BREAK,), How.GRAPH_BREAK, run_with_real_positions),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(DECODE_CONTEXT, PREFILL_GRAPHS, TRITON),
)
