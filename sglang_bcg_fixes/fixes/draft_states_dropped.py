# SPDX-License-Identifier: Apache-2.0
"""Slower: fewer drafts accepted with NEXTN (Qwen3-Next, text Qwen3.5, Qwen3 and EXAONE MoE)

Symptom: With NEXTN (EAGLE) speculation and default flags, the drafts of Qwen3-Next, of Qwen3's and EXAONE's mixtures of
experts and of text-only Qwen3.5 are accepted less often. Answers stay right but come more slowly; nothing in the log.
Cause: Such a draft model joins each token's embedding with the target's hidden state, and passes the result to its
layers as embeddings. The prefill runner has an embeddings buffer for multimodal models and EAGLE3 only. Without one,
the draft's layers are captured looking up the token ids, and a replay drops the embeddings that it is passed: the
draft's cache of a prompt knows nothing of the target. Up to 0.5.18 an unrelated rule left these drafts without a graph.
Change: Only with SGLANG_BCG_FIX_DRAFT_STATES_DROPPED=on, until it has been measured on a GPU: nothing is answered
wrongly without it. Before capture, the draft's forward is run once to see what it passes to its layers. If that is
embeddings and the runner has no buffer for them, it gets one; SGLang's own capture and replay then use it.
Remove when: Every release that has to be served gives these drafts that buffer.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import EAGLE, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import CAPTURE_PREFILL, OLD_PREFILL_MODULE, PREFILL, SETUP_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, slower

if TYPE_CHECKING:
    from torch import Tensor

BUFFER = "input_embeds"


class Handed(Exception):
    """Raised to leave a model's forward where it calls its layers; carries the call's arguments."""

    def __init__(self, arguments: inspect.BoundArguments) -> None:
        self.arguments = arguments


def probe(source: Source) -> Finding:
    if source.has_module(OLD_PREFILL_MODULE):
        return absent("such drafts get no prefill graph")
    rule = source.find(f"{SETUP_MODULE}:has_standard_gqa_for_all_local_layers")
    if rule is None:
        setup = source.need(
            CAPTURE_PREFILL,
            "sglang.srt.model_executor.model_runner:ModelRunner.init_prefill_cuda_graph",
        )
        if setup.mentions("attention_layers) < ") and setup.mentions("model_config.num_hidden_layers"):
            return absent("such drafts have fewer layers than their configuration says, and get no graph", setup)
        return drifted("which drafts get a graph is decided", setup)
    runner = source.need(f"{PREFILL}.__init__")
    for_eagle3 = runner.mentions("register_input_embeds=self.is_multimodal or self._use_draft_input_embeds")
    if runner.mentions("self.static_draft_hidden_states") and (for_eagle3 or not runner.mentions("register_input")):
        others = " or EAGLE3" if for_eagle3 else ""
        return affected(f"a draft that is not multimodal{others} has no buffer for embeddings", runner, rule)
    return drifted("embedding buffers are allocated", runner, rule)


def give_the_draft_a_buffer(self: Any) -> None:
    # only a draft's breakable graphs have a buffer for the target's states
    if self.static_draft_hidden_states is None or self.buffer_registry.has_slot(BUFFER):
        return
    handed = handed_to_the_layers(self)
    if handed is None:
        return
    from sglang.srt.model_executor import cuda_graph_buffer_registry as registry

    self._input_embeds_arg_idx, embeddings = handed
    self.buffer_registry.register_slot(
        registry.GraphSlot(
            BUFFER,
            lambda _, tokens: (tokens, *embeddings.shape[1:]),
            embeddings.dtype,
            axis="tokens",
            padding_policy=registry.PaddingPolicy.ZERO,
            copy_from_fb=False,
        )
    )


def handed_to_the_layers(runner: Any) -> tuple[int, Tensor] | None:
    """Embeddings that the model's forward passes to its layers, and their position among the arguments."""
    import torch

    layers, model = runner.layer_model, runner.model_runner.model
    signature = inspect.signature(layers.forward)

    def leave(*args: Any, **kwargs: Any) -> Any:
        raise Handed(signature.bind(*args, **kwargs))

    batch, _ = runner.capture_prepare(runner.capture_num_tokens[0])
    with torch.no_grad(), replaced(layers, "forward", leave), runner._prefill_forward_context(batch):
        try:
            model.forward(batch.input_ids, batch.positions, batch)
        except Handed as handed:
            for name in (BUFFER, "inputs_embeds"):
                embeddings = handed.arguments.arguments.get(name)
                if embeddings is not None:
                    return list(signature.parameters).index(name), embeddings
    return None


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{PREFILL}.capture",), How.BEFORE, give_the_draft_a_buffer),),
    workarounds=PREFILL_GRAPHS_OFF,
    default="off",
    concerns=slower(EAGLE, PREFILL_GRAPHS),
)
