"""Linear attention leaves the padded rows of its output uninitialised

Symptom: NaN or garbage that comes and goes in Qwen3-Next, Qwen3.5 and Kimi-Linear, where later layers look at all rows
of the padded batch: expert routing, quantisation scales, collectives.
Cause: A bucket is larger than the batch, linear attention computes the real rows only, and its output was made by
torch.empty in the captured graph. Nothing writes the rows behind the last token. To 0.5.12.post1 breakable graphs
capture the operation with all rows of the bucket, which hides this; piecewise graphs, and the fix of
linear_attention_captured, bring it out (that fix zeroes the rows itself).
Change: A fix would zero those rows after every linear attention break. This version only watches for it.
Remove when: No release before 0.5.19 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed

MODULE = "sglang.srt.layers.radix_linear_attention"


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("this release has no RadixLinearAttention")
    operation = source.need(
        f"{MODULE}:_linear_attention_with_output_impl",
        f"{MODULE}:unified_linear_attention_with_output",
    )
    if "output[:, real_num_tokens:].zero_" in operation.calls:
        return fixed("linear attention zeroes the padded rows of its output", operation)
    return affected("linear attention writes the real rows only", operation)


FIX = Fix(
    id="linear_tail_uninitialised",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "27a19d0491d4": "unified_linear_attention_with_output, 0.5.11 to 0.5.12.post1",
        "4307b98c9b36": "unified_linear_attention_with_output, 0.5.13 to 0.5.13.post1",
        "a0cf6e8525c0": "unified_linear_attention_with_output, 0.5.14 to 0.5.18",
        "a0ba0890da7b": "_linear_attention_with_output_impl, 0.5.19",
        "7318c3e36214": "_linear_attention_with_output_impl, 0.5.20",
        "0d96944b8dd3": "_linear_attention_with_output_impl, 0.5.21 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
