# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next, Qwen3.5 and Kimi-Linear answer wrongly or die with breakable graphs

Symptom: With breakable CUDA graphs on, models with gated delta net or KDA layers (Qwen3-Next, Qwen3.5, Kimi-Linear)
answer wrongly with HTTP 200 (GSM8K 16.5 % instead of 86.7 % for Qwen3.5-4B in the upstream report), or the server dies
with "illegal memory access" after some dozens of prefills.
Cause: RadixLinearAttention.forward calls its operation directly, so capture freezes the metadata, the grid sizes and
the state slots of the dummy batch into the graph, and every replay computes with them. Ordinary attention breaks the
graph at this point; linear attention does not.
Change: Under breakable capture and replay the operation runs as an eager break, made by the installed release's own
eager_on_graph, and the padded tail of its output is zeroed. Everywhere else the operation is unchanged.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_bcg_fixes.anatomy.launches import DELTA_ATTENTION, GATED_DELTA, LIGHTNING_LAYERS, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.radix_linear_attention"
OPERATION = "unified_linear_attention_with_output"
BREAKS = (
    f"bcg_{OPERATION}",
    "RadixLinearAttention._eager_linear_attention",
)


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("this release has no RadixLinearAttention")
    if not any(source.has_module(module) for module in DECORATOR_MODULES):
        return absent("this release has no breakable CUDA graphs")
    forward = source.need(f"{MODULE}:RadixLinearAttention.forward")
    called = {name.rpartition(".")[2] for name in forward.calls}
    for name in BREAKS:
        stem = name.rpartition(".")[2]
        if stem in called and source.is_graph_break(MODULE, name):
            return fixed(f"forward calls {stem}, which is a graph break", forward, source.need(f"{MODULE}:{name}"))
    operation = source.need(f"{MODULE}:{OPERATION}")
    decorator = source.need(*(f"{module}:eager_on_graph" for module in DECORATOR_MODULES))
    if OPERATION in called:
        return affected(f"forward calls {OPERATION} with no graph break between", forward, operation, decorator)
    return drifted("forward reaches linear attention", forward)


def run_and_zero_tail(
    original: Callable[..., None], mixed_qkv: Tensor, a: Tensor, b: Tensor, output: Tensor, layer_id: int
) -> None:
    """Run the original operation, then zero the padded rows, which nothing else writes."""
    from sglang.srt.compilation.piecewise_context_manager import get_forward_context

    original(mixed_qkv, a, b, output, layer_id)
    real_tokens = get_forward_context().forward_batch.num_token_non_padded_cpu
    if real_tokens is not None:
        output[:, real_tokens:].zero_()


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/issues/25110",),
    probe=probe,
    patches=(
        PatchPoint(
            where=(f"{MODULE}:{OPERATION}",),
            how=How.GRAPH_BREAK,
            body=run_and_zero_tail,
        ),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("qwen3_next_prefill_graph", "qwen3_5_text_prefill_graph", "qwen3_5_prefill_graph"),
    concerns=wrong(GATED_DELTA | DELTA_ATTENTION | LIGHTNING_LAYERS, PREFILL_GRAPHS),
)
