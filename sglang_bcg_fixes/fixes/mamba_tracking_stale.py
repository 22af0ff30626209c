# SPDX-License-Identifier: Apache-2.0
"""Wrong answers on later cache hits with --enable-mixed-chunk (Ling 2.5, Ring 2.5)

Symptom: With --enable-mixed-chunk, the extra-buffer strategy of the Mamba prefix cache and lightning attention (Ling
2.5, Ring 2.5) on breakable prefill graphs, cached states are overwritten with those of other requests: wrong answers
wherever such a prefix is found later, nothing in the log.
Cause: Mixing running requests into a prefill drops the batch's mamba_track_mask. The prefill graph's static buffers
skip fields that a batch lacks, and the layers still read them: the mask and the slots of the previous prefill.
Change: Before a batch without a mask is filled in, the mask in the static buffers is cleared, so that nothing is
written. With mixed_chunk_drops_tracking such a batch has a mask.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, LIGHTNING_LAYERS, MIXED_CHUNKS, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL_MODULE, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

FILL = "sglang.srt.model_executor.cuda_graph_buffer_registry:CudaGraphBufferRegistry.fill_from"
MIX = "sglang.srt.managers.schedule_batch:ScheduleBatch.mix_with_running"
MASK = "mamba_track_mask"


def probe(source: Source) -> Finding:
    if source.has_module(OLD_PREFILL_MODULE):
        return absent("the prefill runner of this release carries no checkpoints")
    load = source.need(f"{PREFILL}.load_batch")
    fill, given = source.need(FILL), load.need_assignment_to(MASK)
    kept = source.need(MIX).assignment_to(f"self.{MASK}")
    if kept:
        return fixed("a mixed batch keeps the mask of its prefill", fill, given, kept)
    if given.mentions("registry.has_slot('mamba_track_mask')") and fill.mentions("if src is None"):
        reason = "a mixed batch has no mask, and the layers get that of an earlier one"
        return affected(reason, fill, given, source.need(MIX).header)
    return drifted("the layers get the mask", fill, given)


def clear_the_mask(self: Any, forward_batch: Any, **_: Any) -> None:
    if forward_batch.mamba_track_mask is None and self.buffer_registry.has_slot(MASK):
        self.buffer_registry.get_slot(MASK).buffer.zero_()


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{PREFILL}.load_batch",), How.BEFORE, clear_the_mask),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(LIGHTNING_LAYERS, MIXED_CHUNKS, EXTRA_BUFFERS, PREFILL_GRAPHS),
)
