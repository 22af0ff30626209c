# SPDX-License-Identifier: Apache-2.0
"""Llama 4 answers prompts beyond 8,192 tokens wrongly with full prefill graphs

Symptom: With --cuda-graph-backend-prefill full, which SGLang calls experimental, Llama 4 on FlashAttention answers a
prompt longer than its attention chunk (8,192 tokens) wrongly, with HTTP 200. A long prompt is concerned from its second
chunk of prefill on. Breakable and compiled prefill graphs are right.
Cause: Local layers see only their chunk of the prompt. Eager prefill plans that for each batch; a graph without breaks
is captured, and replayed, with a plan that has nothing for local layers, so they attend to all of the prompt.
Change: A batch with a sequence longer than the chunk runs eagerly. All others are replayed as before: there a chunk is
all of the prompt. Under DP attention a rank votes before the batch is prepared, and takes all new tokens to be one
request's.
Remove when: Every release that has to be served plans local layers for these graphs.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import FLASH_ATTENTION, FULL_PREFILL_GRAPHS, LOCAL
from sglang_bcg_fixes.anatomy.refusals import none_without_breaks, questions, refusing_in_full_graphs
from sglang_bcg_fixes.anatomy.workarounds import BREAKABLE_PREFILL_GRAPHS
from sglang_bcg_fixes.writing import Finding, Fix, Source, affected, fixed, unknown, wrong

BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
PLAN = f"{BACKEND}._init_full_cg_prefill_metadata"
# how a layer knows that it attends locally
LOCAL_PLAN = "local_attn_metadata"


def probe(source: Source) -> Finding:
    if none := none_without_breaks(source):
        return none
    plan = source.need(PLAN)
    asked = questions(source)
    if any(question.mentions("attention_chunk_size") for question in asked):
        return unknown("batches are refused by the chunk, as no known release does", plan, *asked)
    if plan.mentions(LOCAL_PLAN):
        return fixed("local layers are planned for", plan, *asked)
    return affected("nothing is planned for local layers, which then attend to all of the prompt", plan, *asked)


def sees_beyond_its_chunk(runner: Any, _prefix: int, longest: int) -> bool:
    model_runner = runner.model_runner
    return bool(model_runner.model_config.is_local_attention_model) and longest > model_runner.attention_chunk_size


FIX = Fix(
    probe=probe,
    patches=refusing_in_full_graphs(sees_beyond_its_chunk),
    workarounds=BREAKABLE_PREFILL_GRAPHS,
    verify=("llama_4_unbroken_chunk",),
    concerns=wrong(LOCAL, FULL_PREFILL_GRAPHS, FLASH_ATTENTION),
)
