# SPDX-License-Identifier: Apache-2.0
"""Intermittent NaN or garbage in DeepSeek-V3.2 and GLM-5 (explicit breakable graphs)

Symptom: Intermittent NaN or garbage in DeepSeek-V3.2, GLM-5 and other models with sparse latent attention, whose later
layers read every row of the padded batch: expert routing, quantisation scales, collectives. Only with
--cuda-graph-backend-prefill breakable: by default latent attention turns prefill graphs off.
Cause: These models have a break of their own, which multiplies by w_kc and then attends. Attention computes the real
rows only, and the captured graph allocates its output with new_empty. Nothing writes the rows after the last token.
Change: That break zeroes those rows when it has run, as attention_tail_uninitialised does for ordinary attention.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.attention_break import padded_rows
from sglang_bcg_fixes.anatomy.forward_batch import zero_behind_the_last_token
from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, LATENT, SPARSE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"
OPERATION = f"{MODULE}:mla_bmm_then_unified_attention"
BREAK = f"{MODULE}:bcg_mla_bmm_then_unified_attention"


def probe(source: Source) -> Finding:
    if source.find(BREAK) is None:
        return absent("latent attention has no break of its own")
    operation = source.need(OPERATION)
    inner = padded_rows(source)
    if "unified_attention_with_output" not in operation.calls:
        return drifted("the break attends", operation)
    read = (operation, source.need(BREAK))
    if inner.verdict is Verdict.AFFECTED:
        finding = affected("the break attends to the real rows only", *read)
    else:
        finding = fixed("the operation that the break attends with zeroes the padded rows", *read)
    return Finding(finding.verdict, finding.reason, (*finding.evidence, *inner.evidence))


def run_and_zero_tail(
    original: Callable[..., None],
    q_nope_t: Tensor,
    w_kc: Tensor,
    q_nope_out_buf: Tensor,
    q_nope_out_view: Tensor,
    k_nope: Tensor,
    attn_output_buf: Tensor,
    *rest: Any,
    **options: Any,
) -> None:
    original(q_nope_t, w_kc, q_nope_out_buf, q_nope_out_view, k_nope, attn_output_buf, *rest, **options)
    zero_behind_the_last_token(attn_output_buf)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((BREAK,), How.GRAPH_BREAK, run_and_zero_tail),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("kimi_linear_prefill_graph",),
    concerns=wrong(LATENT, SPARSE, ASKED_FOR),
)
