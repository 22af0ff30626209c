# SPDX-License-Identifier: Apache-2.0
"""A text is answered as the previous prompt (Cosmos3-Edge, models of other packages)

Symptom: A multimodal model answers a text as if it had been given the previous prompt, with HTTP 200. It takes an
explicit breakable prefill backend and a model whose forward passes its layers token ids when there is no image, as
Cosmos3-Edge's does and other packages' may. SGLang's own image routine, which its other models use, always embeds.
Cause: The graph of a multimodal model reads embeddings from a static buffer. A replay copies the layers' embeddings
argument there, and when there is none the buffer keeps what an earlier batch or the capture left.
Change: When the layers of a batch without images are called without embeddings, their token ids are embedded into the
buffer before the replay. Embeddings that they are called with are copied there, unless they already lie there: where
the model has embedded the text, nothing embeds it again.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, IMAGES, MODEL_OF_YOUR_OWN, named
from sglang_bcg_fixes.anatomy.layer_inputs import replayed_forward, takes_no_embeddings
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL_MODULE, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

LOAD = f"{PREFILL}.load_batch"
FILL = f"{PREFILL}._fill_input_embeds_slot"
EXECUTE = f"{PREFILL}.execute"
# method that replaces the layers' forward and runs the model
CALLS_THE_MODEL = (f"{PREFILL}._execute_body_capture", EXECUTE)
SLOT = "input_embeds"
SPELLINGS = (SLOT, "inputs_embeds")

_parameters: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def probe(source: Source) -> Finding:
    replay = replayed_forward(source)
    if replay is None or takes_no_embeddings(source):
        return absent("the graphs look up the embeddings themselves")
    if source.has_module(OLD_PREFILL_MODULE):
        return absent("a replay receives every embedding, or fails (vlm_embeds_dropped)")
    given, fill = source.need(LOAD).need_assignment_to("input_embeds"), source.find(FILL)
    if fill and "self._fill_input_embeds_slot" in replay.calls:
        return fixed("a replay embeds the token ids where it receives no embeddings", replay, fill, given)
    caller = source.need(*CALLS_THE_MODEL)
    if "self.model_runner.model.forward" not in caller.calls:
        return drifted("the model is run", replay, given, caller)
    return affected("a replay that receives no embeddings uses those of an earlier one", replay, given, caller)


def fill_before_replay(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    layers, model = self.layer_model, self.model_runner.model
    # compiled graphs hold the whole model, embedding included
    if layers is None or not self.buffer_registry.has_slot(SLOT) or not self.model_runner.pp_group.is_first_rank:
        return original(self, forward_batch, **kwargs)
    names, forward = parameters_of(layers), model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        # SGLang's replay is already there
        replay = layers.forward

        def fill_and_replay(*args: Any, **kwargs: Any) -> Any:
            fill(self, forward_batch, dict(zip(names, args, strict=False)) | kwargs, names[0])
            return replay(*args, **kwargs)

        with replaced(layers, "forward", fill_and_replay):
            return forward(*args, **kwargs)

    with replaced(model, "forward", run):
        return original(self, forward_batch, **kwargs)


def parameters_of(layers: Any) -> tuple[str, ...]:
    if layers not in _parameters:
        _parameters[layers] = tuple(inspect.signature(layers.forward).parameters)
    return _parameters[layers]


def fill(runner: Any, forward_batch: Any, given: dict[str, Any], ids: str) -> None:
    """Fill the buffer that the graph reads, from the layers' argument or by embedding their token ids."""
    model = runner.model_runner.model
    embeddings = next((given[name] for name in SPELLINGS if given.get(name) is not None), None)
    if embeddings is None:
        # ids that stand for images are not rows of the table
        if forward_batch.contains_mm_inputs() or not hasattr(model, "get_input_embeddings"):
            return
        embeddings = model.get_input_embeddings()(given.get(ids))
    slot = runner.buffer_registry.get_slot(SLOT).slice_for(1, len(embeddings))
    # SGLang's image routine has already written a wider argument here, and the layers are called with it
    if slot.shape == embeddings.shape and slot.data_ptr() != embeddings.data_ptr():
        slot.copy_(embeddings)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((EXECUTE,), How.AROUND, fill_before_replay),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(IMAGES, ASKED_FOR, named("Cosmos3Edge*") | MODEL_OF_YOUR_OWN),
)
