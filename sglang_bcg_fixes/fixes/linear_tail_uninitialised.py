# SPDX-License-Identifier: Apache-2.0
"""Intermittent NaN or garbage in Qwen3-Next, Qwen3.5 and Kimi-Linear with prefill graphs

Symptom: Intermittent NaN or garbage in Qwen3-Next, Qwen3.5 and Kimi-Linear, where later layers read every row of the
padded batch: expert routing, quantisation scales, collectives.
Cause: A bucket is larger than the batch, linear attention computes the real rows only, and the captured graph allocates
its output with torch.empty. Nothing writes the rows after the last token. Up to 0.5.12.post1 the operation is captured
with all rows of the bucket; linear_attention_captured, which takes it out of the graph, zeroes them itself.
Change: The linear attention break zeroes those rows when it has run. Piecewise graphs are left as they are.
Remove when: No release before 0.5.19 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_bcg_fixes.anatomy.forward_batch import zero_behind_the_last_token
from sglang_bcg_fixes.anatomy.launches import DELTA_ATTENTION, GATED_DELTA, PREFILL_GRAPHS, QUANTISED
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, possible, wrong

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.radix_linear_attention"
BREAK = f"{MODULE}:bcg_unified_linear_attention_with_output"


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("this release has no RadixLinearAttention")
    operation = source.need(
        f"{MODULE}:_linear_attention_with_output_impl",
        f"{MODULE}:unified_linear_attention_with_output",
    )
    if "output[:, real_num_tokens:].zero_" in operation.calls:
        return fixed("linear attention zeroes the padded rows of its output", operation)
    broken = source.find(BREAK)
    if broken is None:
        return absent(
            "linear attention is captured with every row of the bucket, and no break leaves any out", operation
        )
    return affected("linear attention writes the real rows only", operation, broken)


def run_and_zero_tail(
    original: Callable[..., None], mixed_qkv: Tensor, a: Tensor, b: Tensor, output: Tensor, layer_id: int
) -> None:
    original(mixed_qkv, a, b, output, layer_id)
    # a single batch of rows: the first dimension is 1
    zero_behind_the_last_token(output[0])


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((BREAK,), How.GRAPH_BREAK, run_and_zero_tail),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=(
        "qwen3_next_prefill_graph",
        "qwen3_5_text_prefill_graph",
        "qwen3_5_text_by_default",
        "qwen3_5_prefill_graph",
        "qwen3_5_by_default",
    ),
    concerns=wrong(GATED_DELTA | DELTA_ATTENTION, PREFILL_GRAPHS, QUANTISED)
    + possible(GATED_DELTA | DELTA_ATTENTION, PREFILL_GRAPHS),
)
