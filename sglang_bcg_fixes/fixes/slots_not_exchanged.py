# SPDX-License-Identifier: Apache-2.0
"""Next chat turn may, rarely, continue from a wrong cached state (hybrid models)

Symptom: Hybrid models (Qwen3-Next, Qwen3.5, Kimi-Linear, NemotronH, Falcon-H1, Granite 4, Ling 2.5 and others) with the
extra-buffer strategy of the Mamba prefix cache, their default, rarely answer the next turn of a chat wrong. In the last
answer a decode step at a multiple of --mamba-track-interval came just before or after a prefill, or together with one
in a mixed chunk, and a stop token ended it one token before the next multiple. Nothing in the log.
Cause: A request saves its states to two slots in turn. With overlap the scheduler exchanges them as soon as the step
before the boundary is processed, if the one at the boundary is in flight then. A prefill in between prevents that, a
prefill afterwards makes it exchange them twice, and a mixed step saves no state at all. Then the next boundary
overwrites the last checkpoint, and a request that ends while that step is in flight leaves it under the old length.
Change: The slots are exchanged when the step is processed that has saved a state to one of them.
Remove when: SGLang exchanges them once for each state that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.checkpoints import OLD_UPDATE, PROCESSOR, UPDATE, holder
from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, OVERLAP
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, NO_OVERLAP, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, wrong

HANDLE = f"{PROCESSOR}._handle_finish_state_updated_req"


def probe(source: Source) -> Finding:
    update = source.need(UPDATE, OLD_UPDATE)
    if not update.mentions("known_boundary"):
        return absent("slots are exchanged where a boundary is counted", update)
    handle = source.need(HANDLE)
    if handle.mentions("known_mamba_boundary = bool(batch.mamba_track_mask_next_cpu[i])") and update.mentions(
        "get_mamba_ping_pong_other_idx(track_idx)"
    ):
        return affected("slots are exchanged for the step in flight, and again for its result", handle, update)
    return drifted("slots are exchanged", handle, update)


def update(
    original: Callable[..., None],
    self: Any,
    req: Any,
    batch: Any,
    result: Any,
    i: int,
    known_boundary: bool = False,
) -> None:
    # all that is done for one that is known is to exchange the slots
    if not known_boundary:
        original(self, req, batch, result, i, known_boundary)


def exchange(self: Any, req: Any, batch: Any, result: Any, i: int, *_: Any, **__: Any) -> None:
    # before a request that has ended gives its slots to the cache or to its session
    pool, saved = batch.req_to_token_pool, batch.mamba_track_mask_cpu
    # None with speculative decoding; the lazy strategy takes another slot when it needs one
    if saved is None or not saved[i] or pool.enable_mamba_extra_buffer_lazy:
        return
    tracked = holder(req)
    # None once the request has no slots any more
    if tracked.mamba_next_track_idx is not None:
        tracked.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(batch.mamba_track_buffer_indices[i])


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29792",),
    probe=probe,
    patches=(
        PatchPoint((UPDATE,), How.AROUND, update),
        PatchPoint((HANDLE,), How.BEFORE, exchange),
    ),
    workarounds=(*NO_OVERLAP, *CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(HYBRID, EXTRA_BUFFERS, OVERLAP),
)
