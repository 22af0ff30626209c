# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: wrong on cache hits, or the server ends (--enable-mixed-chunk, --page-size)

Symptom: With --enable-mixed-chunk, a --page-size above 1 and the extra-buffer strategy of the Mamba prefix cache,
hybrid models (Qwen3-Next, Qwen3.5, Kimi-Linear, NemotronH, Falcon-H1, Granite 4 and others) answer wrong where a prefix
is found whose prompt was computed in several chunks beside running requests, and nothing is in the log. Before 0.5.16
"page_aligned_len != len(kv_indices)" ends the server instead.
Cause: Running requests take tokens from a chunk, so that it ends between two pages. The next chunk saves its checkpoint
a multiple of 64 tokens, or of the model's chunk, behind that place, between two pages again. The prefix cache has keys
of whole pages: it cuts the key back to the page before, and keeps the state, which is ahead of it by some tokens.
Change: A checkpoint between two pages is not cached. The next one at the end of a page is, as before.
Remove when: Every release that has to be served saves checkpoints where a key can end.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, MIXED_CHUNKS, PAGES
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, MIXED_CHUNKS_OFF, PAGES_OF_ONE_TOKEN
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

PLACE = "sglang.srt.managers.schedule_batch:ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"


def probe(source: Source) -> Finding:
    place = source.need(PLACE)
    if place.mentions("% self.tree_cache.page_size"):
        return fixed("a checkpoint is saved at the end of a page", place)
    counted_from_the_prefix = ("len(req.prefix_indices) +", "req.prefix_len +", "prefix_len +")
    if not place.mentions("mamba_last_track_seqlen = mamba_track_seqlen_aligned") or not any(
        place.mentions(f"mamba_track_seqlen_aligned = {start}") for start in counted_from_the_prefix
    ):
        return drifted("the place of a checkpoint is chosen", place)
    return affected("checkpoints are counted from where a chunk begins, in a page or between two", place)


def forget_a_place_between_pages(entry: Any, self: Any, req: Any, *_: Any, **__: Any) -> Any:
    # among the request's own fields before 0.5.19
    saved = req if hasattr(req, "mamba_last_track_seqlen") else req.kv
    place = saved.mamba_last_track_seqlen
    if place is not None and place % self.tree_cache.page_size:
        saved.mamba_last_track_seqlen = None
    return entry


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((PLACE,), How.AFTER, forget_a_place_between_pages),),
    workarounds=(*MIXED_CHUNKS_OFF, *PAGES_OF_ONE_TOKEN, *CHECKPOINTS_OFF),
    verify=("qwen3_next_mixed_chunks",),
    concerns=wrong(HYBRID, MIXED_CHUNKS, PAGES, EXTRA_BUFFERS),
)
