# SPDX-License-Identifier: Apache-2.0
"""Unusual names of layers: no prefill graphs, no start, or wrong answers in your own model

Symptom: A model whose attribute names the runner does not know gets no prefill graphs. Where breakable graphs are asked
for, prefill runs eagerly on 0.5.12 and 0.5.13 (Gemma 4 with images), and the server stops at start-up on 0.5.14 (the
same) and 0.5.16 (Qwen3-Omni, dots.ocr). Where the names lead to a module that also computes logits, as they can in a
model of your own, prefill answers wrongly with HTTP 200 on 0.5.12 and 0.5.13; from 0.5.14 the server stops at start-up.
Cause: The runner captures `language_model.model`, or whatever has an attribute `layers`, without checking that this
module runs all layers, can be called with a batch, and leaves the logits to the model.
Change: Latent, because we know of no model in these releases that the names mislead: a check, made only with
SGLANG_BCG_FIX_LAYER_STACK_BY_NAME=on. Before capture, the layers are also looked for by structure. If structure finds
another module, that is captured, and one warning names both. If structure has no answer, SGLang's choice is kept, and
one warning says why. If SGLang's names find nothing, prefill stays eager, and one warning says where the layers are; a
server that stops there still does.
Remove when: Every release that has to be served looks for the layers by structure.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from sglang_bcg_fixes.anatomy import layer_stack
from sglang_bcg_fixes.anatomy.launches import MODEL_OF_YOUR_OWN, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, drifted, ends, latent

BY_NAME = "_resolve_transformer_layer_model"
FLAG = "SGLANG_BCG_FIX_LAYER_STACK_BY_NAME"

logger = logging.getLogger("sglang_bcg_fixes")


def probe(source: Source) -> Finding:
    made = source.need(f"{PREFILL}.__init__", f"{OLD_PREFILL}.__init__")
    if not made.mentions("self.layer_model"):
        return absent("the whole model is captured", made)
    read = [made, source.need(f"{PREFILL}.capture", f"{OLD_PREFILL}._warmup")]
    if BY_NAME in made.calls:
        read.append(source.need(f"{PREFILL_MODULE}:{BY_NAME}"))
    if read[-1].mentions("hasattr(layer_model, 'layers')") or made.mentions("hasattr(language_model.model, 'layers')"):
        return latent("the layers are looked for under `language_model`, `model` and `layers`", *read)
    return drifted("the layers are looked for", *read)


def is_old(source: Source) -> bool:
    return source.find(f"{OLD_PREFILL}.__init__") is not None


def prefer_structure(self: Any) -> None:
    # other graph kinds capture the whole model
    if self.layer_model is None:
        return
    by_name = path_of(self.model_runner.model, self.layer_model)
    try:
        stack = by_structure(self)
    except layer_stack.Unresolved as reason:
        warn(
            self,
            f"SGLang captures {by_name}, found by name; whether that is right cannot be told by structure: {reason}. "
            f"Compare its answers with those of a server without prefill graphs",
        )
        return
    if stack.module is self.layer_model:
        return
    warn(self, f"by name SGLang found the layers in {by_name}; by structure they are {stack.path}, which is captured")
    self.layer_model = stack.module
    if hasattr(self, "_input_embeds_arg_idx"):
        # a replay takes the embeddings from this argument position
        self._input_embeds_arg_idx = place_of_embeddings(stack)


def say_where_the_layers_are(result: None, self: Any, model_runner: Any) -> None:
    if self.layer_model is not None:
        return
    try:
        stack = by_structure(self)
    except layer_stack.Unresolved as reason:
        warn(self, f"prefill runs eagerly: its layers were found neither by name nor by structure: {reason}")
    else:
        warn(self, f"prefill runs eagerly: SGLang knows no name for its layers, which are {stack.path}")


def by_structure(runner: Any) -> layer_stack.LayerStack:
    stack = layer_stack.resolve(runner.model_runner.model, runner.attention_layers)
    if runner.is_multimodal and place_of_embeddings(stack) is None:
        raise layer_stack.Unresolved(f"{stack.path} takes no embeddings, and the model has more than text")
    return stack


def place_of_embeddings(stack: layer_stack.LayerStack) -> int | None:
    parameters = list(inspect.signature(stack.module.forward).parameters)
    return next((parameters.index(name) for name in layer_stack.EMBEDDINGS if name in parameters), None)


def path_of(model: Any, module: Any) -> str:
    names = (path for path, part in model.named_modules() if part is module)
    return next(names, None) or type(module).__qualname__


def warn(runner: Any, what: str) -> None:
    model = type(runner.model_runner.model)
    logger.warning(
        "bcg-fixes layer_stack_by_name: %s.%s: %s. %s=off ends this check",
        model.__module__,
        model.__qualname__,
        what,
        FLAG,
    )


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((f"{PREFILL}.capture", f"{OLD_PREFILL}._warmup"), How.BEFORE, prefer_structure),
        PatchPoint((f"{OLD_PREFILL}.__init__",), How.AFTER, say_where_the_layers_are, needed=is_old),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    default="off",
    verify=("llama_stack_by_structure",),
    concerns=ends(PREFILL_GRAPHS, MODEL_OF_YOUR_OWN),
)
