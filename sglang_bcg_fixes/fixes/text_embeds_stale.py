"""A text replays the embeddings of an earlier batch

Symptom: A multimodal model answers a text as if it had been given another prompt, the one before, with HTTP 200. It
takes an explicit breakable prefill backend and a model whose forward hands its layers token ids where there is no
image, as models of other packages do; SGLang's own routine for images always embeds.
Cause: The graph of a multimodal model reads embeddings from a static buffer. A replay copies there what the layers are
called with, and where that is nothing the buffer keeps what an earlier batch or the capture left.
Change: Before the replay of a batch without images its token ids are embedded into the buffer. Where the model embeds
them itself the same values are written again.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.fixes.vlm_embeds_dropped import replayed_forward, takes_no_embeddings
from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix, How, PatchPoint
from sglang_bcg_fixes.probe import Source, absent, affected, fixed
from sglang_bcg_fixes.runners import OLD_PREFILL_MODULE, PREFILL

LOAD = f"{PREFILL}.load_batch"
FILL = f"{PREFILL}._fill_input_embeds_slot"


def probe(source: Source) -> Finding:
    replay = replayed_forward(source)
    if replay is None or takes_no_embeddings(source):
        return absent("the graphs look the embeddings up by themselves")
    if source.has_module(OLD_PREFILL_MODULE):
        return absent("a replay is given every embedding, or fails (vlm_embeds_dropped)")
    given, fill = source.need(LOAD).need_assignment_to("input_embeds"), source.find(FILL)
    if fill and "self._fill_input_embeds_slot" in replay.calls:
        return fixed("a replay embeds the token ids where it is given no embeddings", replay, fill, given)
    return affected("a replay that is given no embeddings has those of an earlier one", replay, given)


def embed_the_text(static: Any, self: Any, forward_batch: Any, **_: Any) -> Any:
    slot, model = static.input_embeds, self.model_runner.model
    # compiled graphs hold the whole model, which embeds
    if slot is None or self.layer_model is None or not self.model_runner.pp_group.is_first_rank:
        return static
    # ids that stand for images are no rows of the table, and such a batch brings its embeddings
    if not forward_batch.contains_mm_inputs() and hasattr(model, "get_input_embeddings"):
        embedded = model.get_input_embeddings()(static.input_ids)
        # layers that are handed something wider are called with it
        if embedded.shape == slot.shape:
            slot.copy_(embedded)
    return static


FIX = Fix(
    id="text_embeds_stale",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "2d2686fe144f": "PrefillCudaGraphRunner.execute.replay_layer_forward, 0.5.14",
        "63dec184a917": "PrefillCudaGraphRunner.load_batch's input_embeds, 0.5.14 to 0.5.23",
        "e255be0276a9": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.16",
        "c490197f4d4e": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.17 to 0.5.20",
        "8f59668a67b7": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.21",
        "127376500b9e": "PrefillCudaGraphRunner._fill_input_embeds_slot, 0.5.21 to 0.5.23",
        "071826bbae84": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.22",
        "595ba4ba9c7a": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.23",
    },
    patches=(PatchPoint((LOAD,), How.AFTER, f"{__name__}:embed_the_text"),),
    mitigations=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
)
