# SPDX-License-Identifier: Apache-2.0
"""Next chat turn wrong, often on a busy server (hybrid models, extra_buffer_lazy)

Symptom: Hybrid models (Qwen3-Next, Qwen3.5, Kimi-Linear, NemotronH, Falcon-H1, Granite 4, Ling 2.5 and others) with
--mamba-radix-cache-strategy extra_buffer_lazy (before 0.5.16 --mamba-scheduler-strategy) answer the next turn of a chat
wrong, often on a busy server. A prompt was computed just before the last answer crossed a multiple of
--mamba-track-interval, or the last prompt ended one token before one. Nothing in the log.
Cause: A request has one slot for its state, and gets another one for a decode step at a boundary, which counts as the
saved state at once. The boundary itself is found when a result is processed, by a length that the step in flight has
already moved on. If a prefill was in flight in between, no result is processed at that length: the new state is cached
under the old length. Where the boundary comes right behind a prompt, the prompt's length gets the state of a step that
is still in flight, and a mixed step at a boundary leaves a state that nobody has written.
Change: A boundary is found by the length of the step whose result is processed. Until then the older one of two slots
has the saved state. A request that ends in the step before a boundary leaves its last checkpoint instead. Where the
pool had no second slot, a prompt whose decode step is in flight is still cached wrong. With speculative decoding, which
has slots of its own from 0.5.17 on, nothing changes.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.checkpoints import CHECK, OLD_UPDATE, PROCESSOR, check_processed, processed_length
from sglang_bcg_fixes.anatomy.launches import HYBRID, LAZY_BUFFERS
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

KEEP = "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_ping_pong_keep_idx"
FREE = f"{PROCESSOR}.mamba_lazy_post_decode_at_boundary"
ALLOCATE = "sglang.srt.managers.schedule_batch:ScheduleBatch.mamba_lazy_prealloc_at_boundary"


def probe(source: Source) -> Finding:
    allocate = source.find(ALLOCATE)
    if allocate is None:
        return absent("there is no lazy strategy", source.need(OLD_UPDATE))
    check, keep, free = source.need(CHECK), source.need(KEEP), source.need(FREE)
    read = (allocate, check, keep, free)
    if keep.mentions("return req.mamba_last_track_idx") or keep.mentions("return req.kv.mamba_last_track_idx"):
        return fixed("the slot with the saved state is remembered", *read)
    if (
        allocate.mentions("req.mamba_next_track_idx = other_idx")
        and check.mentions("req.kv_committed_len % interval == 0")
        and keep.mentions("return req.mamba_next_track_idx")
        and free.mentions("req.mamba_lazy_is_insert = False")
    ):
        return affected("a slot counts as the saved state before a step has written it", *read)
    return drifted("the lazy strategy takes slots", *read)


def check_track_boundary(
    original: Callable[..., tuple[bool, int]], self: Any, req: Any, batch: Any, result: Any, i: int
) -> tuple[bool, int]:
    if not batch.spec_algorithm.is_none() or not batch.req_to_token_pool.enable_mamba_extra_buffer_lazy:
        return original(self, req, batch, result, i)
    is_in_flight = req.kv_committed_len != processed_length(req)
    alone = is_in_flight and req.finished() and not has_both_slots(req)
    # the pool was full: a step in flight at a boundary overwrites the only state
    if alone and original(self, req, batch, result, i)[0]:
        req.mamba_lazy_is_insert = False
    at_boundary, length = check_processed(original, self, req, batch, result, i)
    if alone and at_boundary:
        # the step that has ended wrote the only slot, which SGLang would then not cache
        req.mamba_last_track_seqlen = length
        return False, 0
    return at_boundary, length


def slot_with_the_saved_state(original: Callable[..., int], self: Any, req: Any) -> int:
    index = original(self, req)
    # a draft's verification has a second slot that does not count yet
    speculates = hasattr(self.mamba_pool.mamba_cache, "intermediate_ssm")
    if not self.enable_mamba_extra_buffer_lazy or speculates or not has_both_slots(req):
        return index
    return 1 - index


def has_both_slots(req: Any) -> bool:
    """Tell whether a request has a slot for a state that no finished step has written."""
    slots = req.mamba_ping_pong_track_buffer
    return len(slots) > 1 and bool((slots != -1).all())


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29792",),
    probe=probe,
    patches=(
        PatchPoint((CHECK,), How.AROUND, check_track_boundary),
        PatchPoint((KEEP,), How.AROUND, slot_with_the_saved_state),
    ),
    workarounds=(*CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(HYBRID, LAZY_BUFFERS),
)
