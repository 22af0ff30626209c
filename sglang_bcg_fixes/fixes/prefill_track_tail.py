# SPDX-License-Identifier: Apache-2.0
"""Inkling answers wrongly on prefix-cache hits, after a later prefill spoilt them

Symptom: Inkling answers wrong where the prefix cache resumes from a checkpoint that a later prefill has overwritten
with the window of another prompt. It takes a batch of fewer requests than an earlier one. Nothing in the log; default
flags.
Cause: Inkling's prefill graphs have no breaks, and a fixed number of requests. A replay fills in the requests of its
batch and clears the lengths of the others, but not their mamba_track_mask nor the slots beside it. The convolutions
save a window for each request that the mask names, so they write to the slots of requests that ended long ago.
Change: Before a batch is filled in, the mask of the requests that it does not have is cleared, so that nothing is
written for them.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import FULL_PREFILL_GRAPHS, INKLING, PREFIX_CACHE
from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

LOAD = f"{PREFILL}.load_batch"
CONVOLUTIONS = "sglang.srt.models.inkling_common.sconv"
MASK = "mamba_track_mask"


def probe(source: Source) -> Finding:
    if not source.has_module(CONVOLUTIONS):
        return absent("no model of this release saves checkpoints in a prefill graph without breaks")
    load = source.need(LOAD)
    save = source.need(f"{CONVOLUTIONS}:ShortConvolution._prepare_extend_sconv_cache")
    if not save.mentions(f"mask=forward_batch.{MASK}"):
        return drifted("a checkpoint is asked for", save)
    if load.mentions(f"for name in ('{MASK}', 'mamba_track_indices')") and load.mentions(".buffer[bs:r].zero_()"):
        return fixed("the mask of requests that the batch does not have is cleared", load, save)
    if load.mentions("s['extend_seq_lens'][bs:r].zero_()") and load.mentions(f"_slot('{MASK}')"):
        return affected(
            "of requests that the batch does not have, the lengths are cleared and the mask is not", load, save
        )
    return drifted("the rows behind the batch are cleared", load, save)


def clear_the_tail(self: Any, forward_batch: Any, **_: Any) -> None:
    if self._is_full_backend and self.buffer_registry.has_slot(MASK):
        self.buffer_registry.get_slot(MASK).buffer[forward_batch.batch_size : self._capture_req_slots].zero_()


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((LOAD,), How.BEFORE, clear_the_tail),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(FULL_PREFILL_GRAPHS | INKLING, PREFIX_CACHE),
)
