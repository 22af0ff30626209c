"""Attention leaves the padded rows of its output uninitialised

Symptom: NaN or garbage that comes and goes, in models whose later layers look at all rows of the padded batch: expert
routing, quantisation scales, collectives.
Cause: A bucket is larger than the batch, attention computes the real rows only, and its output was made by torch.empty
in the captured graph. Nothing writes the rows behind the last token.
Change: A fix would zero those rows after every attention break. This version only watches for it.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

import ast

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed

MODULE = "sglang.srt.layers.radix_attention"
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
    only_amd = [node for node in ast.walk(operation.node) if isinstance(node, ast.If) and "_is_hip" in names(node.test)]
    if any(".zero_()" in ast.unparse(node) for node in only_amd):
        return affected("attention zeroes the padded rows on AMD only", operation)
    return affected("attention writes the real rows only", operation)


def names(node: ast.expr) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


FIX = Fix(
    id="attention_tail_uninitialised",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "5253d5a5f846": "unified_attention_with_output, 0.5.11 to 0.5.12.post1",
        "461a5cbb48b2": "unified_attention_with_output, 0.5.13 to 0.5.13.post1",
        "a178a5fd29fd": "unified_attention_with_output, 0.5.14 to 0.5.15.post1",
        "8b198423a338": "unified_attention_with_output, 0.5.16",
        "0315d7d0dd78": "_zero_padded_pcg_tail, 0.5.16 to 0.5.22",
        "7c35c6a9986c": "_unified_attention_with_output_impl, 0.5.17",
        "09e86e825f59": "_unified_attention_with_output_impl, 0.5.18",
        "82bf21f9defd": "_unified_attention_with_output_impl, 0.5.19",
        "7e31c35d48c6": "_unified_attention_with_output_impl, 0.5.20 to 0.5.22",
        "1bfe641eaeaa": "RadixAttention._eager_attention, 0.5.23",
        "1aef5ac644c4": "_zero_padded_tokens, 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
