# SPDX-License-Identifier: Apache-2.0
"""The graph break around attention, and the padded rows of its output."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

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


def padded_rows(source: Source) -> Finding:
    """Find whether attention leaves the padded rows uninitialised."""
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


def join_heads(layer: Any, inputs: Any, output: Tensor) -> Tensor | None:
    """Hook a layer that hands its queries in by heads, which a break then gives its output back as."""
    return output.flatten(1) if output.dim() == 3 else None
