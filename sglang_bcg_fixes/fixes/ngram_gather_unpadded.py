# SPDX-License-Identifier: Apache-2.0
"""Qwen4 with DP attention dies at the first prompt that does not fill its prefill graph

Symptom: With --enable-dp-attention and default flags, Qwen4 ends at the first prompt whose prefill is replayed and that
does not fill its graph: a collective refuses the sizes of its tensors. Not with SGLANG_USE_ATTN_TP_NGRAM=1.
Cause: Under data parallel attention all ranks gather their tokens' n-gram ids, which runs in a break of the graph. Each
gives as many rows as the graph has, but the buffer is made for the longest prompt among the ranks.
Change: There, each rank counts as many tokens as the graph has, as all ranks replay graphs of one size.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.qwen4 import MODEL, nothing_in_a_break
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

GATHER = f"{MODEL}:Qwen4ExpNGramEmbedding._prepare_embedding_lookup"
SCATTER = f"{MODEL}:Qwen4ExpNGramEmbedding._finish_embedding_lookup"
SYNC = "sglang.srt.model_executor.forward_batch_info:ForwardBatch.prepare_mlp_sync_batch"


def probe(source: Source) -> Finding:
    if missing := nothing_in_a_break(source, GATHER):
        return missing
    gathers = source.need(GATHER)
    read = [gathers, source.need(SCATTER), source.need(SYNC)]
    if source.need(SYNC).mentions("global_num_tokens = [bucket] * sync_group_size"):
        return fixed("each rank counts as many tokens as the graph has", *read)
    if not gathers.mentions("forward_batch.global_dp_buffer_len"):
        return drifted("n-gram ids are gathered", *read)
    return affected("ranks gather as many rows as the graph has, into a buffer for fewer", *read)


def gather(original: Callable[..., Any], self: Any, ngram_ids: Any, forward_batch: Any, physical_tokens: int) -> Any:
    return original(self, ngram_ids, counted(forward_batch, physical_tokens), physical_tokens)


def scatter(
    original: Callable[..., Any],
    self: Any,
    embeddings: Any,
    semantic_tokens: int,
    forward_batch: Any,
    physical_tokens: int,
) -> Any:
    return original(self, embeddings, semantic_tokens, counted(forward_batch, physical_tokens), physical_tokens)


def counted(batch: Any, tokens: int) -> Any:
    """Return this batch, or where its ranks are padded to fewer tokens than these, a copy that counts these."""
    mode, counts = batch.dp_padding_mode, batch.global_num_tokens_gpu
    if mode is None or not mode.is_max_len() or counts is None:
        return batch
    length = tokens * len(counts)
    if batch.global_dp_buffer_len is None or batch.global_dp_buffer_len >= length:
        return batch
    padded = copy.copy(batch)
    padded.global_dp_buffer_len = length
    padded.global_num_tokens_gpu = counts.new_full(counts.shape, tokens)
    # they are computed of the counts by whoever asks first
    padded.dp_local_start_pos = padded.dp_local_num_tokens = None
    return padded


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((GATHER,), How.AROUND, gather), PatchPoint((SCATTER,), How.AROUND, scatter)),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(named("Qwen4*"), DP_ATTENTION, PREFILL_GRAPHS),
)
