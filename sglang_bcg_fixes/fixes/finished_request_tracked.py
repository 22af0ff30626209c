# SPDX-License-Identifier: Apache-2.0
"""Crash or rare wrong answers: speculation with structured output (hybrid models)

Symptom: Hybrid models (Qwen3.5, Qwen3-Next, NemotronH) with speculative decoding and structured output. On 0.5.13 to
0.5.15.post1, "'NoneType' object cannot be interpreted as an integer" ends the server as a request finishes. On 0.5.16
to 0.5.21 it goes on, and now and then a later prompt that finds a prefix in the cache is answered wrong. With the
extra-buffer strategy, which from 0.5.14 is the default.
Cause: With structured output, the results of one step are processed after the next one has been prepared and before it
runs. A request that they finish takes part in that step all the same, although its slots have been given to the prefix
cache or freed. Its index among them is None then, which no tensor can hold. From 0.5.16 on it counts as the first, so
a step that passes a multiple of --mamba-track-interval may overwrite the slot that the cache has been given.
Change: The states of such a request are saved to slot 0, which SGLang reserves for rows that nobody reads.
Remove when: No release before 0.5.22 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.checkpoints import INDEX, holder
from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, SPECULATION, STRUCTURED_OUTPUT
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

TRACK = "sglang.srt.managers.schedule_batch:set_mamba_track_indices_from_reqs"
OLD_TRACK = "sglang.srt.speculative.eagle_info_v2:EagleVerifyInputV2Mixin.prepare_for_v2_verify"
FREE = "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.free_mamba_cache"
RESERVED = 0


def probe(source: Source) -> Finding:
    freed = source.need(FREE)
    track = source.find(TRACK)
    if track is None and not freed.mentions(f"{INDEX} = None"):
        return absent("a request keeps its index among the slots that it frees", freed, source.need(OLD_TRACK))
    track = source.need(TRACK)
    if track.mentions("batch.mamba_track_indices[freed_rows] = -1"):
        return fixed("a request without slots saves nothing", track)
    if takes_none(source):
        return affected("a request without slots has no index among them", track, freed)
    if takes_the_first(source):
        return affected("a request without slots saves to the first one that it had", track, freed)
    return drifted("slots to save to are chosen", track)


def takes_none(source: Source) -> bool:
    return source.need(TRACK).mentions(f"[req.{INDEX} for req in batch.reqs]")


def takes_the_first(source: Source) -> bool:
    return source.need(TRACK).mentions(f"{INDEX} is not None else 0")


def track_without_freed(original: Callable[..., None], batch: Any) -> None:
    rows = freed_rows(batch)
    for row in rows:
        batch.reqs[row].mamba_next_track_idx = 0
    try:
        original(batch)
    finally:
        for row in rows:
            batch.reqs[row].mamba_next_track_idx = None
    save_elsewhere(batch, rows)


def save_freed_elsewhere(nothing: None, batch: Any, *_: Any, **__: Any) -> None:
    save_elsewhere(batch, freed_rows(batch))


def freed_rows(batch: Any) -> list[int]:
    return [row for row, request in enumerate(batch.reqs) if getattr(holder(request), INDEX) is None]


def save_elsewhere(batch: Any, rows: list[int]) -> None:
    if rows:
        batch.mamba_track_indices[rows] = RESERVED


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/28407",
        "https://github.com/sgl-project/sglang/issues/27325",
        "https://github.com/sgl-project/sglang/pull/27998",
    ),
    probe=probe,
    patches=(
        PatchPoint((TRACK,), How.AROUND, track_without_freed, needed=takes_none),
        PatchPoint((TRACK,), How.AFTER, save_freed_elsewhere, needed=takes_the_first),
    ),
    workarounds=CHECKPOINTS_OFF,
    verify=("qwen3_next_adaptive_speculation",),
    concerns=wrong(HYBRID, SPECULATION, EXTRA_BUFFERS, STRUCTURED_OUTPUT),
)
