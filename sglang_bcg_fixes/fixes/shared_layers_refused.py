# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n and Gemma 4 (E2B, E4B) do not start with prefill graphs

Symptom: A Gemma 3n, or a Gemma 4 whose last layers read the KV cache of earlier ones (E2B, E4B), stops at start-up with
`ValueError: invalid or duplicate attention layer_id`, before prefill graphs are captured. From 0.5.19 on no flag is
needed for the text models; with images or audio it takes an explicit prefill backend, and there is a second error
behind it.
Cause: The attention layer of such a layer has the id of the layer whose cache it reads. The list that a graph break
looks a layer up in is made by these ids, and two layers with one id are refused. Up to 0.5.18 the list was made by
place.
Change: Where a layer has the id of an earlier one, and the same heads, sizes and window, the list is made without it,
and then it is put at its own place, as up to 0.5.18. Other lists are made as before, and other layers with one id are
refused as before.
Remove when: Every release that has to be served lists layers that share a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_bcg_fixes.anatomy.launches import (
    COMPILED_PREFILL_GRAPHS,
    FULL_PREFILL_GRAPHS,
    PREFILL_GRAPHS,
    has_key,
)
from sglang_bcg_fixes.anatomy.runners import SETUP_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.concern import Condition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed, latent

LIST = f"{SETUP_MODULE}:index_attention_layers_by_global_id"
MODELS = (
    "sglang.srt.models.gemma3n_causal:Gemma3nAttention.__init__",
    "sglang.srt.models.gemma4_causal:Gemma4Attention.__init__",
)
SHARES = "self.kv_shared_layer_index"
# what a break or a backend asks of the layer that it finds under an id
ALIKE = (
    "tp_q_head_num",
    "tp_k_head_num",
    "tp_v_head_num",
    "qk_head_dim",
    "v_head_dim",
    "scaling",
    "logit_cap",
    "sliding_window_size",
    "attn_type",
)
ANY_PREFILL_GRAPHS = PREFILL_GRAPHS | FULL_PREFILL_GRAPHS | COMPILED_PREFILL_GRAPHS
Layers = Sequence[Any]


def probe(source: Source) -> Finding:
    if source.find(f"{SETUP_MODULE}:has_standard_gqa_for_all_local_layers") is None:
        return absent("attention layers are listed by their place")
    makes = source.need(LIST)
    if not makes.mentions("duplicate attention layer_id"):
        return fixed("attention layers may have the same id", makes)
    layers = [source.need(model).need_assignment_to("self.attn") for model in MODELS]
    if not any(layer.mentions(SHARES) for layer in layers):
        return latent("two layers with one id are refused; no model of this release has any", makes, *layers)
    return affected("two layers with one id are refused, and layers that share a KV cache have one", makes, *layers)


def list_those_that_share(
    original: Callable[..., tuple[list[Any], list[Any]]],
    attention_layers: Layers,
    mha_companion_layers: Layers,
    layer_model: Any = None,
) -> tuple[list[Any], list[Any]]:
    sharing = layers_that_share(attention_layers, mha_companion_layers)
    if not sharing:
        return original(attention_layers, mha_companion_layers, layer_model)
    without = [None if place in sharing else layer for place, layer in enumerate(attention_layers)]
    listed, companions = original(without, mha_companion_layers, layer_model)
    # some releases make the list no longer than the largest id asks for
    behind = [None] * (len(attention_layers) - len(listed))
    listed, companions = [*listed, *behind], [*companions, *behind]
    for place, layer in sharing.items():
        listed[place] = layer
    return listed, companions


def layers_that_share(attention_layers: Layers, mha_companion_layers: Layers) -> dict[int, Any]:
    """Layers with the id of an earlier one, by place; none where SGLang knows why to refuse them, or reads no ids."""
    if any(companion is not None for companion in mha_companion_layers):
        return {}
    sharing: dict[int, Any] = {}
    owners: dict[int, Any] = {}
    for place, layer in enumerate(attention_layers):
        if layer is None:
            continue
        if not hasattr(layer, "layer_id"):
            return {}
        owner = owners.setdefault(layer.layer_id, layer)
        # the same layer again is run more than once, which SGLang knows
        if owner is not layer:
            if not are_alike(owner, layer):
                return {}
            sharing[place] = layer
    # an id behind the places is another way to count
    return sharing if sharing.keys().isdisjoint(owners) else {}


def are_alike(owner: Any, layer: Any) -> bool:
    return all(hasattr(owner, name) and getattr(owner, name) == getattr(layer, name, None) for name in ALIKE)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((LIST,), How.AROUND, list_those_that_share),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(ANY_PREFILL_GRAPHS, Condition("layers that share a KV cache", has_key("^num_kv_shared_layers$"))),
)
