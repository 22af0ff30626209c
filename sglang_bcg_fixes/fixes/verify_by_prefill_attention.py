# SPDX-License-Identifier: Apache-2.0
"""DeepSeek, Kimi K2 die at the first answer: trtllm_mla, tc_piecewise and speculation

Symptom: DeepSeek and Kimi K2 on Blackwell with --attention-backend trtllm_mla, compiled prefill graphs (tc_piecewise)
and speculative decoding, DFLASH for one, end with "illegal memory access" at the first answer.
Cause: The attention backend notes in an attribute that a prefill is to be left to FlashInfer, as one in a compiled
graph is. A verification enters by the same method, which looks at that attribute first. An eager one clears it before;
a graph of verifications that is captured after those of prefills does not. So it records FlashInfer's kernel, on
buffers that were planned for another batch.
Change: The attribute is cleared as each verification, or extension of drafts, enters that method. Nothing else reads it
then.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import COMPILED_PREFILL_GRAPHS, SPECULATION, TRTLLM_MLA
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

BACKEND = "sglang.srt.layers.attention.trtllm_mla_backend:TRTLLMMLABackend"
EXTEND = f"{BACKEND}.forward_extend"
LEFT = "self.forward_prefill_metadata.fallback_to_flashinfer_impl:"
# those for which an eager batch clears it
SPECULATIVE = ("TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2")


def probe(source: Source) -> Finding:
    extend = source.need(EXTEND)
    if not extend.mentions(LEFT):
        return drifted("a prefill is left to FlashInfer", extend)
    if extend.mentions(
        "forward_batch.forward_mode.is_extend() and (not forward_batch.forward_mode.is_target_verify())"
    ):
        return fixed("only a prefill is left to FlashInfer", extend)
    return affected("a verification is left to FlashInfer where the last prefill was", extend)


def clear(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    if forward_batch.forward_mode.name in SPECULATIVE:
        self.forward_prefill_metadata = None


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/32288",
        "https://github.com/sgl-project/sglang/pull/31198",
    ),
    probe=probe,
    patches=(PatchPoint((EXTEND,), How.BEFORE, clear),),
    workarounds=(
        Workaround(
            flags="--cuda-graph-backend-prefill disabled",
            option="--cuda-graph-backend-prefill",
            effect="prefill runs eagerly: correct, slower on short prompts",
        ),
        Workaround(
            flags="--disable-piecewise-cuda-graph",
            option="--disable-piecewise-cuda-graph",
            effect="prefill runs eagerly: correct, slower on short prompts",
        ),
    ),
    verify=("kimi_linear_prefill_graph",),
    concerns=ends(COMPILED_PREFILL_GRAPHS, TRTLLM_MLA, SPECULATION),
)
