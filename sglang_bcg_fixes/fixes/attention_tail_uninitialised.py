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

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, affected, fixed

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "sglang.srt.layers.radix_attention"
BREAKS = (f"{MODULE}:breakable_unified_attention_with_output", f"{MODULE}:bcg_unified_attention_with_output")
ZEROING = (
    (f"{MODULE}:_zero_padded_pcg_tail", "_zero_padded_pcg_tail"),
    ("sglang.srt.layers.attention.graph_utils:_zero_padded_tokens", "_zero_padded_tokens"),
)


def probe(source: Source) -> Finding:
    operation = source.need(
        f"{MODULE}:RadixAttention._eager_attention",
        f"{MODULE}:_unified_attention_with_output_impl",
        f"{MODULE}:unified_attention_with_output",
    )
    for where, name in ZEROING:
        if name in operation.calls:
            return fixed(f"attention calls {name} on its output", operation, source.need(where))
    broken = (operation, source.need(*BREAKS))
    only_amd = [node for node in ast.walk(operation.node) if isinstance(node, ast.If) and "_is_hip" in names(node.test)]
    if any(".zero_()" in ast.unparse(node) for node in only_amd):
        return affected("attention zeroes the padded rows on AMD only", *broken)
    return affected("attention writes the real rows only", *broken)


def names(node: ast.expr) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def run_and_zero_tail(
    original: Callable[..., None], query: Tensor, key: Tensor, value: Tensor, output: Tensor, *rest: Any, **options: Any
) -> None:
    original(query, key, value, output, *rest, **options)
    zero_behind_the_last_token(output)


def zero_behind_the_last_token(rows: Tensor) -> None:
    """By the number that the operation itself has cut its rows by: None while some releases capture, when all count."""
    from sglang.srt.layers import radix_attention

    get_context = getattr(radix_attention, "get_tc_piecewise_forward_context", None)
    context = (get_context or radix_attention.get_forward_context)()
    real_tokens = context.forward_batch.num_token_non_padded_cpu
    if real_tokens is not None:
        rows[real_tokens:].zero_()


FIX = Fix(
    id="attention_tail_uninitialised",
    doc=__doc__,
    upstream=(),
    probe=probe,
    patches=(PatchPoint(BREAKS, How.GRAPH_BREAK, f"{__name__}:run_and_zero_tail"),),
    mitigations=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
)
