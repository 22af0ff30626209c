# SPDX-License-Identifier: Apache-2.0
"""Slower: fewer drafts accepted for prompts with images (EAGLE3)

Symptom: With EAGLE3 speculation and a multimodal model, drafts for prompts with images are accepted less often; answers
stay right but come more slowly. From 0.5.17 with default flags, for the models that keep prefill graphs (Qwen3.5,
Kimi-K2.5 from 0.5.18); before, only where the breakable backend is chosen explicitly. That some servers even end is
what draft_ids_out_of_range prevents.
Cause: A draft's layers take the target's image embeddings from the batch. They are captured with a batch that has none,
so the graph looks up the token ids.
Change: Only with SGLANG_BCG_FIX_DRAFT_IMAGES_DROPPED=on, because nothing is answered wrongly without it. A draft whose
graph has no buffer for embeddings runs batches with images eagerly. Under DP attention nothing is changed: all ranks
must decide alike, and none knows of the others' images.
Remove when: No release before 0.5.22 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import EAGLE, IMAGES, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import MAY_REPLAY, OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, slower

STATES = "static_draft_hidden_states"
BUFFER = "input_embeds"


def probe(source: Source) -> Finding:
    allot = source.need(f"{PREFILL}._build_capture_spec_info", f"{OLD_PREFILL}._init_buffers")
    gate = source.need(*MAY_REPLAY)
    if not allot.mentions(f"self.{STATES}"):
        return absent("drafts get no prefill graph", allot)
    if source.find(f"{PREFILL}._use_draft_input_embeds"):
        return fixed("an EAGLE3 draft's graph receives embeddings", allot)
    if "contains_mm_inputs" not in gate.text:
        return affected(
            "drafts are captured looking up the token ids, and batches with images are replayed", allot, gate
        )
    return drifted("a draft's images are handled", allot, gate)


def refuse_images(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    # only a draft's breakable graphs have a buffer for the target's states
    looks_up = getattr(self, STATES, None) is not None and not self.buffer_registry.has_slot(BUFFER)
    if looks_up and forward_batch.global_num_tokens_cpu is None and forward_batch.contains_mm_inputs():
        return False
    return original(self, forward_batch)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(MAY_REPLAY, How.AROUND, refuse_images),),
    workarounds=PREFILL_GRAPHS_OFF,
    default="off",
    concerns=slower(EAGLE, IMAGES, PREFILL_GRAPHS),
)
