# SPDX-License-Identifier: Apache-2.0
"""On trtllm_mla, MLA models such as Kimi K2.5 prefill slower with graphs than without

Symptom: With the trtllm_mla attention backend, as on Blackwell, the first token of Kimi K2.5 or K2.6 comes late, most
of all with an FP8 cache: SGLang's users measured 340 ms instead of 123 ms. So it is with other models of latent
attention (MLA) that have prefill graphs by default. DeepSeek V3 has none there. Answers are right.
Cause: A captured prefill takes the absorbed form. TensorRT-LLM has no such kernel for prompts of unequal lengths, so
FlashInfer's runs, which converts the layer's whole cache to the type of the queries, in every layer and step. Without
the graph TensorRT-LLM's ragged attention runs. SGLang's rule against these graphs knows DeepSeek V3 only.
Change: None: the graphs are right, and no GPU of ours can time them. This version only watches for it.
Remove when: Every release that has to be served refuses these graphs or has a kernel for them.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.latent_attention import TENSORRT_PLAN
from sglang_bcg_fixes.anatomy.launches import LATENT, PREFILL_GRAPHS, TRTLLM_MLA, named
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, fixed, slower

RULES = (
    "sglang.srt.arg_groups.cuda_graph_hook:disable_prefill_cuda_graph_for_deepseek_trtllm_mla",
    "sglang.srt.server_args:ServerArgs._disable_prefill_cuda_graph_for_deepseek_trtllm_mla",
)
DEEPSEEK = "DeepseekV3ForCausalLM"


def probe(source: Source) -> Finding:
    plan = source.need(TENSORRT_PLAN)
    if not plan.mentions("is_in_breakable_cuda_graph()"):
        return absent("a captured prefill is not left to FlashInfer", plan)
    rule = source.need(*RULES)
    if rule.mentions(f"'{DEEPSEEK}' not in"):
        return affected("a captured prefill is left to FlashInfer, and the rule against it knows one model", plan, rule)
    return fixed("the rule against such graphs is for every model", plan, rule)


def is_not_exempt(launch: Launch) -> bool | None:
    return False if named(DEEPSEEK).holds(launch) else LATENT.holds(launch)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/32655",
        "https://github.com/sgl-project/sglang/pull/35807",
    ),
    probe=probe,
    workarounds=(
        Workaround(
            flags="--cuda-graph-backend-prefill disabled",
            option="--cuda-graph-backend-prefill",
            effect="prefill runs eagerly, with TensorRT-LLM's ragged attention",
        ),
    ),
    concerns=slower(Condition(LATENT.says, is_not_exempt), TRTLLM_MLA, PREFILL_GRAPHS),
)
