# SPDX-License-Identifier: Apache-2.0
"""A prompt with an image can end the server (multimodal models with speculation)

Symptom: With speculation and a multimodal model, a prompt with an image ends the server in the draft's prefill
("device-side assert triggered"), where one rank has the whole table of embeddings: with --tp-size 1, or with data
parallel attention. With EAGLE3, from 0.5.17 to 0.5.21 with default flags, for models that keep prefill graphs; before,
and with NemotronH's own draft from 0.5.22 on, only where the breakable backend is chosen explicitly.
Cause: In the place of an image a batch has ids far outside the vocabulary. Eagerly such a draft takes embeddings from
the batch. Its graph is captured with a batch that has none, so it looks up the ids.
Change: Before such a draft's graph is replayed for a batch with images, ids in the memory that it reads are clamped to
the vocabulary, as SGLang does for the target. Where the table is divided, no rank looks such an id up, and nothing
changes. Drafts do not see the image in either case; SGLANG_BCG_FIX_DRAFT_IMAGES_DROPPED=on lets them (to 0.5.21).
Remove when: Every release that has to be served gives a draft's graph the embeddings.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, EAGLE, IMAGES, PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed

STATES = "static_draft_hidden_states"
FILL = (f"{PREFILL}.load_batch", f"{OLD_PREFILL}.replay_prepare")
# its layers take the embeddings from the batch by themselves
DRAFT = "sglang.srt.models.nemotron_h_mtp:NemotronHMultiTokenPredictor.forward"
EMBEDDINGS = "forward_batch.mm_input_embeds"
TABLE = "VocabParallelEmbedding"


def probe(source: Source) -> Finding:
    allot = source.need(f"{PREFILL}._build_capture_spec_info", f"{OLD_PREFILL}._init_buffers")
    if not allot.mentions(f"self.{STATES}"):
        return absent("drafts get no prefill graph", allot)
    read, found = [allot, source.need(*FILL).header], []
    if looks_up_ids_of_eagle3(source):
        found.append("an EAGLE3 draft is captured looking up the ids of its batch")
    draft = source.find(DRAFT)
    if draft and draft.mentions(EMBEDDINGS):
        read.append(draft)
        found.append("the layers of NemotronH's draft look up the ids where they are captured")
    return affected("; ".join(found), *read) if found else fixed("a draft's graph receives embeddings", *read)


def looks_up_ids_of_eagle3(source: Source) -> bool:
    return source.find(f"{PREFILL}._use_draft_input_embeds") is None


def clamp(result: Any, self: Any, forward_batch: Any, **_: Any) -> Any:
    # only a draft's breakable graphs have a buffer for the target's states
    if getattr(self, STATES, None) is None or not forward_batch.contains_mm_inputs():
        return result
    if not is_divided(self.model_runner.model):
        filled = result[0] if isinstance(result, tuple) else result
        filled.input_ids.clamp_(min=0, max=self.model_runner.model_config.vocab_size - 1)
    return result


def is_divided(model: Any) -> bool:
    """Tell whether each rank has a part of the embeddings and leaves ids out that are in none."""
    return any(type(module).__name__ == TABLE and module.tp_size > 1 for module in model.modules())


def has_such_a_draft(launch: Launch) -> bool | None:
    needed = (EAGLE,) if looks_up_ids_of_eagle3(launch.source) else (EAGLE, named("NemotronH_*"), ASKED_FOR)
    found = {condition.holds(launch) for condition in needed}
    return False if False in found else None if None in found else True


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(FILL, How.AFTER, clamp),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(Condition("a draft that looks up ids", has_such_a_draft), IMAGES, PREFILL_GRAPHS),
)
