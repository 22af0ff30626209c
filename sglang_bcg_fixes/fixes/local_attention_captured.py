# SPDX-License-Identifier: Apache-2.0
"""Llama 4 answers wrongly with full prefill graphs

Symptom: With --cuda-graph-backend-prefill full, which SGLang calls experimental, Llama 4 on FlashAttention answers
wrongly, with HTTP 200. By default its local layers have a KV pool of their own. A prompt is answered wrongly once its
slots differ between the two pools. With --disable-hybrid-swa-memory only prompts longer than the attention chunk are
wrong, from the second chunk on. Breakable and compiled prefill graphs are right.
Cause: Local layers see only their chunk of the prompt, in their own pool. Eager prefill plans that for each batch; a
graph without breaks is captured, and replayed, with a plan that has nothing for local layers. They attend to all of the
prompt, and look for it in the slots of the other pool. Layers with a sliding window are planned for, in any pool.
Change: Where local layers have a pool of their own, every batch runs eagerly; breakable graphs are faster. No GPU has
run this case. Elsewhere a batch with a sequence longer than the chunk runs eagerly, and all others are replayed as
before: there a chunk is all of the prompt. Under DP attention a rank votes before the batch is prepared, and takes all
new tokens to be one request's. SGLang 0.5.15 is left alone: it makes no prefill graphs of Llama 4.
Remove when: Every release that has to be served plans local layers for these graphs.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import FA3, FULL_PREFILL_GRAPHS, LOCAL
from sglang_bcg_fixes.anatomy.refusals import none_without_breaks, questions, refusing_in_full_graphs
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, EXECUTOR
from sglang_bcg_fixes.anatomy.workarounds import BREAKABLE_PREFILL_GRAPHS
from sglang_bcg_fixes.writing import Finding, Fix, Source, affected, fixed, latent, unknown, wrong

BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
PLAN = f"{BACKEND}._init_full_cg_prefill_metadata"
# how a layer knows that it attends locally
LOCAL_PLAN = "local_attn_metadata"
# of the first releases with such graphs: it refuses models whose layers are not below `model`
OLD_CAPTURE = f"{EXECUTOR}.model_runner:ModelRunner.init_prefill_cuda_graph"
REFUSES = "not hasattr(self.model, 'model')"
LLAMA_4 = "sglang.srt.models.mllama4:Llama4ForConditionalGeneration.__init__"


def probe(source: Source) -> Finding:
    if none := none_without_breaks(source):
        return none
    attend = source.need(f"{BACKEND}.forward_extend")
    capture = source.need(CAPTURE_PREFILL, OLD_CAPTURE)
    asked = questions(source)
    read = [source.need(PLAN), *map(attend.need_assignment_to, ("use_local_attn", "is_swa_layer")), capture, *asked]
    if any(question.mentions("attention_chunk_size") for question in asked):
        return unknown("batches are refused by the chunk, as no known release does", *read)
    if read[0].mentions(LOCAL_PLAN):
        return fixed("local layers are planned for", *read)
    reason = "nothing is planned for local layers, which then attend to all of the prompt, in slots of another pool"
    if capture.mentions(REFUSES):
        model = source.need(LLAMA_4)
        if model.assignment_to("self.model") is None:
            return latent(f"{reason}; Llama 4 gets no prefill graphs, as it has no attribute `model`", *read, model)
    return affected(reason, *read)


def misses_its_chunk(runner: Any, _prefix: int, longest: int) -> bool:
    model_runner = runner.model_runner
    config = model_runner.model_config
    if not config.is_local_attention_model:
        return False
    # of hybrid window memory: local layers then have a pool of their own
    return bool(config.is_hybrid_swa) or longest > model_runner.attention_chunk_size


FIX = Fix(
    probe=probe,
    patches=refusing_in_full_graphs(misses_its_chunk),
    workarounds=BREAKABLE_PREFILL_GRAPHS,
    verify=("llama_4_unbroken_chunk",),
    concerns=wrong(LOCAL, FULL_PREFILL_GRAPHS, FA3),
)
