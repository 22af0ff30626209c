"""Latent attention is dispatched as if no breakable graph were captured

Symptom: DeepSeek, Kimi-Linear and other models with latent attention (MLA) stop at start-up, while prefill graphs are
captured, with a shape mismatch in `q.view`. From 0.5.14 only where the breakable backend is chosen explicitly: its
default is off for these models.
Cause: The handlers that choose between the absorbed (MLA) and the expanded (MHA) form ask about piecewise graphs only
and choose MHA, and the attention break then looks its layer up in a list that holds the MLA layer.
Change: A fix would make the handlers choose MLA under a breakable graph too. This version only watches for it.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
ATTENTION = "sglang.srt.layers.radix_attention"


def probe(source: Source) -> Finding:
    handlers = tuple(
        source.need(f"{HANDLERS}:{name}")
        for name in ("_handle_attention_backend", "handle_attention_trtllm_mla", "handle_attention_triton")
    )
    if all("is_in_breakable_cuda_graph" in handler.calls for handler in handlers):
        return fixed("the handlers choose the absorbed form under a breakable graph", *handlers)
    operation = source.need(f"{ATTENTION}:unified_attention_with_output")
    if operation.mentions("context.mha_companion_layers[layer_id]"):
        return fixed("the attention break puts the MHA layer in the place of the MLA layer", *handlers, operation)
    chosen = " (only where the breakable backend is chosen explicitly)"
    return affected(
        f"the handlers choose MHA under a breakable graph, and the break looks up the MLA layer"
        f"{chosen if source.has_option('--cuda-graph-backend-prefill') else ''}",
        *handlers,
        operation,
    )


FIX = Fix(
    id="mla_dispatch_unaware",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "42dd5ba6629f": "_handle_attention_backend, 0.5.11 to 0.5.12.post1",
        "8ed16efa09ff": "handle_attention_trtllm_mla, 0.5.11 to 0.5.13.post1",
        "32b648c5c2cc": "handle_attention_triton, 0.5.11 to 0.5.13.post1",
        "5253d5a5f846": "unified_attention_with_output, 0.5.11 to 0.5.12.post1",
        "0c356822168d": "_handle_attention_backend, 0.5.13 to 0.5.13.post1",
        "461a5cbb48b2": "unified_attention_with_output, 0.5.13 to 0.5.13.post1",
        "71e152dac645": "_handle_attention_backend, 0.5.14 to 0.5.16",
        "2d2fc7233be8": "handle_attention_trtllm_mla, 0.5.14 to 0.5.16",
        "1a3ab47149df": "handle_attention_triton, 0.5.14 to 0.5.15.post1",
        "a178a5fd29fd": "unified_attention_with_output, 0.5.14 to 0.5.15.post1",
        "befaa3a19a5a": "handle_attention_triton, 0.5.16",
        "8b198423a338": "unified_attention_with_output, 0.5.16",
        "36655451c160": "_handle_attention_backend, 0.5.17 to 0.5.19",
        "a325d7722de7": "handle_attention_trtllm_mla, 0.5.17 to 0.5.23",
        "b976c63e6d55": "handle_attention_triton, 0.5.17 to 0.5.19",
        "4d9bacfaaebe": "_handle_attention_backend, 0.5.20 to 0.5.23",
        "41cfe0dda843": "handle_attention_triton, 0.5.20 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
