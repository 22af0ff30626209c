# SPDX-License-Identifier: Apache-2.0
"""Wrong answers on cache hits with --enable-mixed-chunk (hybrid models, extra_buffer)

Symptom: With --enable-mixed-chunk and the extra-buffer strategy of the Mamba prefix cache, Qwen3-Next, Qwen3.5,
Kimi-Linear, NemotronH, Falcon-H1, Granite 4 and other hybrid models answer wrong wherever a prefix is found whose
prompt was computed while others were being answered. In the upstream report GSM8K falls from 93.8 to 87.6 and MMLU from
89.5 to 73.3. Nothing in the log.
Cause: A prefill batch carries which of its prompts save a checkpoint, and where. Mixing running requests into it drops
that. The layers save nothing, and the scheduler caches the slot with whatever state it has.
Change: The mixed batch keeps it for its prompts. Its running requests save no checkpoint there, as in 0.5.23. In 0.5.14
Mamba2 layers take a request that saves none for one without a state, so they no longer ask for that.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, MIXED_CHUNKS
from sglang_bcg_fixes.anatomy.mamba2 import PREPARE, prepare_without_mask
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, MIXED_CHUNKS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch"
# a running request's value of each; a slot is never written to without the mask
UNTRACKED = {"mamba_track_indices": 0, "mamba_track_mask": False, "mamba_track_seqlens": -1}
# copies on the host, from 0.5.21 on
UNTRACKED_ON_HOST = {"mamba_prefill_track_mask_cpu": False, "mamba_track_seqlens_cpu": -1}


def probe(source: Source) -> Finding:
    mix, merge = source.need(f"{BATCH}.mix_with_running"), source.need(f"{BATCH}.merge_batch")
    if mix.mentions("self.mamba_track_mask = torch.cat("):
        return fixed("a mixed batch keeps the checkpoints of its prompts", mix, merge)
    if mix.mentions("mamba_track") or not all(merge.mentions(f"self.{field} = None") for field in UNTRACKED):
        return drifted("checkpoints of a mixed batch are treated", mix, merge)
    return affected("a mixed batch drops the checkpoints of its prompts", mix, merge, source.need(PREPARE))


def hits_are_told_by_the_mask(source: Source) -> bool:
    """Tell whether Mamba2 layers take a request without a checkpoint to save for one without a state."""
    return source.need(PREPARE).mentions("has_initial_states & mamba_track_mask")


def mix_with_running(original: Callable[..., None], self: Any, running_batch: Any) -> None:
    import torch

    rows = running_batch.batch_size()
    tensors = {field: getattr(self, field) for field in UNTRACKED}
    lists = {field: getattr(self, field, None) for field in UNTRACKED_ON_HOST}
    original(self, running_batch)
    # None without the extra-buffer strategy
    for field, kept in tensors.items():
        if kept is not None:
            setattr(self, field, torch.cat([kept, kept.new_full((rows,), UNTRACKED[field])]))
    for field, values in lists.items():
        if values is not None:
            setattr(self, field, values + [UNTRACKED_ON_HOST[field]] * rows)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/22867",
        "https://github.com/sgl-project/sglang/issues/23075",
        "https://github.com/sgl-project/sglang/pull/24613",
        "https://github.com/sgl-project/sglang/issues/39342",
        "https://github.com/sgl-project/sglang/pull/39526",
    ),
    probe=probe,
    patches=(
        PatchPoint((f"{BATCH}.mix_with_running",), How.AROUND, mix_with_running),
        PatchPoint((PREPARE,), How.AROUND, prepare_without_mask, needed=hits_are_told_by_the_mask),
    ),
    workarounds=(*MIXED_CHUNKS_OFF, *CHECKPOINTS_OFF),
    verify=("qwen3_next_mixed_chunks",),
    concerns=wrong(HYBRID, MIXED_CHUNKS, EXTRA_BUFFERS),
)
