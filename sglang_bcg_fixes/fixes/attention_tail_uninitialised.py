"""Attention leaves the padded rows of its output uninitialised

Symptom: NaN or garbage that comes and goes, in models whose later layers look at all rows of the padded batch: expert
routing, quantisation scales, collectives.
Cause: A bucket is larger than the batch, attention computes the real rows only, and its output was made by torch.empty
in the captured graph. Nothing writes the rows behind the last token.
Change: The attention break zeroes those rows behind itself. Piecewise graphs are left as they are; the break of their
own that sparse DeepSeek models have on 0.5.15 is fused_mla_tail_uninitialised.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.attention_break import BREAKS, padded_rows
from sglang_bcg_fixes.anatomy.forward_batch import zero_behind_the_last_token
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source

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
    id="attention_tail_uninitialised",
    doc=__doc__,
    upstream=(),
    probe=probe,
    patches=(PatchPoint(BREAKS, How.GRAPH_BREAK, run_and_zero_tail),),
    mitigations=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
)
