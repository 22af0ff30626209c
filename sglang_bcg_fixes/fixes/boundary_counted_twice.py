# SPDX-License-Identifier: Apache-2.0
"""Next chat turn wrong now and then on a busy server (hybrid models, extra_buffer)

Symptom: Hybrid models (Qwen3-Next, Qwen3.5, Kimi-Linear, NemotronH, Falcon-H1, Granite 4, Ling 2.5 and others) with the
extra-buffer strategy of the Mamba prefix cache, which is the default for most of them from 0.5.14, answer the next turn
of a chat wrong, now and then on a busy server. The last answer had crossed a multiple of --mamba-track-interval just
before a new prompt was computed. Nothing in the log.
Cause: A decode step at a boundary saves its state to one of two slots. When its result is processed, the scheduler
takes that slot for the cache and the other one for the next checkpoint. With overlap it finds the boundary by a length
that the step in flight has already moved on, so one step early. If no decode is in flight the next time, as when a
prefill is, it finds the same boundary again and changes the slots again: the old state passes for the new one. If the
step in flight is a mixed one, which saves nothing, it counts a checkpoint that nobody has written.
Change: A boundary is found by the length of the step whose result is processed. That is once, and only where a decode
step has saved the state. A request that ends in the step before a boundary leaves its last checkpoint instead.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.checkpoints import CHECK, OLD_UPDATE, UPDATE, check_processed
from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, OVERLAP
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, NO_OVERLAP, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong


def probe(source: Source) -> Finding:
    check = source.find(CHECK)
    if check is None:
        update = source.need(OLD_UPDATE)
        if update.mentions("seq_len = len(req.origin_input_ids) + len(req.output_ids) - 1"):
            return absent("a boundary is found by the length of the step whose result is processed", update)
        return drifted("a boundary is found", update)
    if check.mentions("req.decode_batch_idx - batch.mamba_decode_batch_idx_cpu[i]"):
        return fixed("a boundary is found by the length less the step in flight", check)
    if not check.mentions("req.kv_committed_len % interval == 0"):
        return drifted("a boundary is found", check)
    read = (check, source.need(UPDATE))
    return affected("a boundary is found by a length that the step in flight has moved on", *read)


def check_track_boundary(
    original: Callable[..., tuple[bool, int]], self: Any, req: Any, batch: Any, result: Any, i: int
) -> tuple[bool, int]:
    # the lazy strategy changes slots when the step begins, which is another fix's
    if not batch.spec_algorithm.is_none() or batch.req_to_token_pool.enable_mamba_extra_buffer_lazy:
        return original(self, req, batch, result, i)
    return check_processed(original, self, req, batch, result, i)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29792",),
    probe=probe,
    patches=(PatchPoint((CHECK,), How.AROUND, check_track_boundary),),
    workarounds=(*NO_OVERLAP, *CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(HYBRID, EXTRA_BUFFERS, OVERLAP),
)
