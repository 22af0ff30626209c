# SPDX-License-Identifier: Apache-2.0
"""Intermittent NaN or garbage with prefill graphs (experts, quantization, collectives)

Symptom: Intermittent NaN or garbage in models whose later layers read every row of the padded batch: expert routing,
quantisation scales, collectives.
Cause: A bucket is larger than the batch, attention computes the real rows only, and the captured graph allocates its
output with torch.empty. Nothing writes the rows after the last token.
Change: The attention break zeroes those rows when it has run. Piecewise graphs are left as they are; sparse DeepSeek
models have a break of their own on 0.5.15, which fused_mla_tail_uninitialised patches.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.attention_break import BREAKS, padded_rows
from sglang_bcg_fixes.anatomy.forward_batch import zero_behind_the_last_token
from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS, QUANTISED
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, possible, wrong

if TYPE_CHECKING:
    from torch import Tensor


def probe(source: Source) -> Finding:
    return padded_rows(source)


def run_and_zero_tail(
    original: Callable[..., None], query: Tensor, key: Tensor, value: Tensor, output: Tensor, *rest: Any, **options: Any
) -> None:
    original(query, key, value, output, *rest, **options)
    zero_behind_the_last_token(output)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(BREAKS, How.GRAPH_BREAK, run_and_zero_tail),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(PREFILL_GRAPHS, QUANTISED) + possible(PREFILL_GRAPHS),
)
