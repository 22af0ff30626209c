# SPDX-License-Identifier: Apache-2.0
"""Cosmos3-Edge answers images as if they were one line of text (prefill graphs asked for)

Symptom: Cosmos3-Edge mistakes where things are in an image or a video, with HTTP 200. It reads the patches of an image
as one line, like words. Later turns of that conversation are wrong, too. It takes an explicit breakable or full prefill
backend; by default SGLang makes no prefill graphs of this model.
Cause: M-RoPE gives each token three positions. The layers are captured with them only where the model, or its language
model, has the attribute `is_mrope_enabled`. Cosmos3-Edge has none: its forward takes the three whenever they are there.
A replay computes with the one position of each token that was captured.
Change: The graph of Cosmos3-Edge, if SGLang's configuration says M-RoPE, is captured with the three positions. Nothing
is refused, and text alone has its positions three times, as it has eagerly. Of SGLang's other models, only Qwen3-Omni's
outer class lacks the attribute, and its images run eagerly in any case (vlm_embeds_dropped).
Remove when: Every release that has to be served gives Cosmos3-Edge's graph three positions.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, FULL_PREFILL_GRAPHS, REQUESTS_WITH_IMAGES, named
from sglang_bcg_fixes.anatomy.layer_inputs import captured_forward
from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

CHOOSE = f"{PREFILL}._get_layer_model_positions"
SAYS_SO, THREE = "is_mrope_enabled", "mrope_positions"
CONFIGURE = "sglang.srt.configs.model_config:ModelConfig.__init__"
MODULE = "sglang.srt.models.cosmos3_edge"
NAME = "Cosmos3EdgeForConditionalGeneration"
MODEL = f"{MODULE}:{NAME}"


def probe(source: Source) -> Finding:
    captured = captured_forward(source)
    if "self._get_layer_model_positions" not in captured.calls and source.find(CHOOSE) is None:
        return absent("layers are captured with one position for each token (vlm_embeds_dropped)", captured)
    choose = source.need(CHOOSE)
    of_model, of_language_model = (f"getattr({owner}, '{SAYS_SO}', False)" for owner in ("model", "language_model"))
    if not (choose.mentions(of_model) and choose.mentions(of_language_model)):
        return drifted("the positions of the captured layers are chosen", captured, choose)
    read = [captured, choose, source.need(CONFIGURE).need_assignment_to("self.model_is_mrope")]
    if not source.has_module(MODULE):
        return absent("every model that takes three positions says so", *read)
    runs = source.need(f"{MODEL}.forward")
    read += [source.need(f"{MODEL}.__init__"), runs]
    if source.need(MODEL).mentions(SAYS_SO):
        return fixed("Cosmos3-Edge says that it takes three positions", *read)
    if runs.mentions(f"positions = forward_batch.{THREE}"):
        return affected("Cosmos3-Edge takes three positions and does not say so, so its graph gets one", *read)
    return drifted("Cosmos3-Edge chooses its positions", *read)


def take_three_as_the_model_does(result: Any, self: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
    three = forward_batch.mrope_positions
    # context parallelism shares the tokens out, and has positions of its own
    if three is None or result is not forward_batch.positions:
        return result
    # where the configuration does not say M-RoPE, a batch has no such positions and nothing fills their buffer
    if not self.model_runner.model_config.model_is_mrope:
        return result
    return three if takes_three_unasked(self.model_runner.model) else result


def takes_three_unasked(model: Any) -> bool:
    """Tell whether it is the only such model; one that has the attribute, be it false, has been asked."""
    return not hasattr(model, SAYS_SO) and NAME in {kind.__name__ for kind in type(model).__mro__}


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((CHOOSE,), How.AFTER, take_three_as_the_model_does),),
    workarounds=PREFILL_GRAPHS_OFF,
    concerns=wrong(named("Cosmos3Edge*"), ASKED_FOR | FULL_PREFILL_GRAPHS, REQUESTS_WITH_IMAGES),
)
