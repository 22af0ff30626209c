# SPDX-License-Identifier: Apache-2.0
"""Chats forget what came before a short turn (NemotronH, Falcon-H1, Granite 4)

Symptom: NemotronH, Falcon-H1 and Granite 4 with the extra-buffer strategy of the Mamba prefix cache, the default there,
answer as if they had forgotten the conversation wherever a prefix is found and what follows is shorter than the model's
chunk (128 or 256 tokens), as most turns of a chat are. So do prompts whose last piece of a chunked prefill is as short.
Nothing in the log.
Cause: The layers start from a cached state only where the prefill is to save a checkpoint too, which needs a whole
chunk. The attention layers of the same model see the prefix, and the Mamba2 layers do not.
Change: A request starts from its state wherever it has a prefix. Checkpoints are saved as before.
Remove when: 0.5.14 need not be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, MAMBA2_LAYERS
from sglang_bcg_fixes.anatomy.mamba2 import PREPARE, prepare_without_mask
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, unknown, wrong


def probe(source: Source) -> Finding:
    prepare = source.need(PREPARE)
    if not prepare.mentions("has_initial_states = context_lens_tensor > 0"):
        return drifted("a hit is told", prepare)
    if prepare.mentions("has_initial_states & mamba_track_mask[:has_initial_states.shape[0]]"):
        return affected("a request without a checkpoint to save counts as one without a prefix", prepare)
    if prepare.mentions("has_initial_states &"):
        return unknown("a hit is told by more than the length of its prefix, in an unknown way", prepare)
    return fixed("a hit is told by the length of its prefix", prepare)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29368", "https://github.com/sgl-project/sglang/issues/29330"),
    probe=probe,
    patches=(PatchPoint((PREPARE,), How.AROUND, prepare_without_mask),),
    workarounds=(*CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(MAMBA2_LAYERS, EXTRA_BUFFERS),
)
