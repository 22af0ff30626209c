# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 may answer with NaN or garbage, rarely (prefill graphs that were asked for)

Symptom: With breakable prefill graphs, which are opt-in for DeepSeek-V4, or come with context parallelism, perhaps
intermittent NaN or garbage: experts are chosen for every row of the padded batch. Nothing in the log.
Cause: A bucket is larger than the batch. The break of DeepSeek-V4 attends for the real rows only, and the captured
graph allocates its output with new_empty. Nothing writes the rows after the last token.
Change: The break zeroes those rows when it has run, as in SGLang itself from 0.5.21.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import DEEPSEEK_V4, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, possible

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.models.deepseek_v4"
OPERATION = f"{MODULE}:deepseek_v4_attention_with_output"
BREAK = f"{MODULE}:bcg_deepseek_v4_attention_with_output"
# the number of real rows in a batch, the older name first
REAL_ROWS = ("num_token_non_padded_cpu", "global_num_token_non_padded_cpu")


def probe(source: Source) -> Finding:
    if source.find(OPERATION) is None and source.find(BREAK) is None:
        return absent("DeepSeek-V4 has no break of its own")
    operation = source.need(OPERATION)
    read = (operation, source.need(BREAK))
    if operation.mentions("output[real_num_tokens:].zero_()"):
        return fixed("the break zeroes the padded rows", *read)
    if operation.mentions("output[:real_num_tokens].view(ret.shape).copy_(ret)"):
        return affected("the break writes the real rows only", *read)
    return drifted("the break attends", *read)


def run_and_zero_tail(
    original: Callable[..., None], query: Tensor, key_value: Tensor, output: Tensor, *rest: Any, **options: Any
) -> None:
    from sglang.srt.models import deepseek_v4

    original(query, key_value, output, *rest, **options)
    get_context = getattr(deepseek_v4, "get_tc_piecewise_forward_context", None) or deepseek_v4.get_forward_context
    batch = get_context().forward_batch
    real = next(getattr(batch, name) for name in REAL_ROWS if hasattr(batch, name))
    # None, as in some captures, means all rows count
    if real is not None:
        output[real:].zero_()


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((BREAK,), How.GRAPH_BREAK, run_and_zero_tail),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=possible(DEEPSEEK_V4, PREFILL_GRAPHS),
)
