# SPDX-License-Identifier: Apache-2.0
"""No harm in SGLang's models; one of your own may attend wrongly in some layers

Symptom: None with the models and drafts that SGLang ships. A source between releases crashes with Ring and Ling, whose
linear layers are made of RadixAttention ("layer_id=0 not in full attention layers", 0.5.12.post1 to 0.5.13). A model of
your own silently computes some layers with the wrong attention where the ids of its configuration are not those of its
layers, as in a draft whose only attention layer is not its layer 0.
Cause: A layer goes to full attention if its id is in one list. Up to 0.5.12.post1 that is the configuration's; from
0.5.13 a draft's list is [0], whatever its layers are.
Change: Only with SGLANG_BCG_FIX_LAYERS_ROUTED_BY_ID=on. RadixLinearAttention, and the linear layers of Bailing and
MiniCPM, which are made of RadixAttention, go to linear attention; a draft's other RadixAttention layers go to full
attention; the rest are routed by id, as before. Each layer is examined once. No flag of SGLang avoids it.
Remove when: SGLang routes by the kind of the layer.
"""

from __future__ import annotations

import ast
from typing import Any

from sglang_bcg_fixes.anatomy.launches import HYBRID, MODEL_OF_YOUR_OWN
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, latent, unknown, wrong

MODULE = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
ROUTE = f"{MODULE}:HybridLinearAttnBackend._is_full_attn"
# before there was one method to ask, each of these looked up the id itself
OLD_ROUTES = tuple(
    f"{MODULE}:HybridLinearAttnBackend.{name}" for name in ("forward", "forward_decode", "forward_extend")
)
LINEAR_BACKEND = f"{MODULE}:MambaAttnBackendBase.__init__"
# linear attention whose `attn` is a RadixAttention, elsewhere full attention
LINEAR_OF_PLAIN_LAYERS = (
    "sglang.srt.models.bailing_moe_linear:BailingMoELinearAttention",
    "sglang.srt.models.minicpm:MiniCPMLightningMixer",
)
MARK = "_is_linear_attention"
# attribute on the layer that caches the decision
DECIDED = "bcg_fixes_is_full_attention"
# everything that any known routing looks at; the guard looks at all of it too, so it can replace each of them
LOOKED_AT = {"self", "full_attn_layers", "layer", "layer_id", "isinstance", "getattr", MARK}
KINDS = {"RadixLinearAttention", "RadixAttention"}


def probe(source: Source) -> Finding:
    read = [
        source.need(f"{where}.__init__").need_assignment_to("self.attn")
        for where in LINEAR_OF_PLAIN_LAYERS
        if source.find(where)
    ]
    read.append(source.need(LINEAR_BACKEND).header)
    if asks_three_methods(source):
        read += [source.need(where) for where in OLD_ROUTES]
        return latent("layers are routed by id, whatever kind they are", *read)
    route = source.need(ROUTE)
    looked_at = words_in(route)
    if not looked_at <= LOOKED_AT | KINDS:
        return unknown(f"layers are routed by {', '.join(sorted(looked_at - LOOKED_AT - KINDS))} too", route)
    by = "kind, which not every linear layer shows" if looked_at & KINDS else "id, whatever kind they are"
    return latent(f"layers are routed by {by}", *read, route.header)


def asks_one_method(source: Source) -> bool:
    return source.find(ROUTE) is not None


def asks_three_methods(source: Source) -> bool:
    return not asks_one_method(source)


def words_in(function: Definition) -> set[str]:
    """Every name in its body and decorators, strings included, so that nothing that decides can hide."""
    assert isinstance(function.node, ast.FunctionDef)
    statements = [*function.node.body, *function.node.decorator_list]
    nodes = [node for statement in statements for node in ast.walk(statement)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (
        {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {text for text in strings if text.isidentifier()}
    )


def note_what_ids_do_not_tell(result: None, self: Any, model_runner: Any) -> None:
    """Note whose layers follow, and which of them are linear without looking it.

    Models are not patched for this: that would import them, and one that cannot be imported must not fail the rest.
    """
    self.is_draft_worker = model_runner.is_draft_worker
    model = getattr(model_runner, "model", None)
    for module in model.modules() if model is not None else ():
        if any(f"{kind.__module__}:{kind.__qualname__}" in LINEAR_OF_PLAIN_LAYERS for kind in type(module).__mro__):
            setattr(module.attn, MARK, True)


def belongs_to_full(backend: Any, layer: Any) -> bool:
    # runs for every layer of an eager step, so each layer caches the answer
    of_layer = layer.__dict__
    if DECIDED not in of_layer:
        of_layer[DECIDED] = is_full_by_kind(backend, layer)
    is_full: bool | None = of_layer[DECIDED]
    return layer.layer_id in backend.full_attn_layers if is_full is None else is_full


def is_full_by_kind(backend: Any, layer: Any) -> bool | None:
    """Answer by kind, or None where only the id can tell."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    if isinstance(layer, RadixLinearAttention) or vars(layer).get(MARK):
        return False
    # another package's linear backend may not derive from SGLang's, which knows whether it serves a draft
    is_drafts = getattr(backend.linear_attn_backend, "is_draft_worker", False)
    # never "full" for every RadixAttention of a target: models outside of SGLang make linear layers of it, unmarked
    return True if is_drafts and isinstance(layer, RadixAttention) else None


def route(original: Any, self: Any, layer: Any, layer_id: int | None = None) -> Any:
    return original(self, layer, layer_id) if layer is None else belongs_to_full(self, layer)


class Rerouted:
    """View of a backend for one call: another list of full attention layers, everything else unchanged."""

    def __init__(self, backend: Any, full_attn_layers: tuple[int, ...]) -> None:
        self.backend = backend
        self.full_attn_layers = full_attn_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def seen_by(layer: Any, backend: Any) -> Any:
    """Return the backend itself, unless its list of ids would send this layer to the wrong attention."""
    if layer is None:
        return backend
    is_full = belongs_to_full(backend, layer)
    if is_full == (layer.layer_id in backend.full_attn_layers):
        return backend
    return Rerouted(backend, (layer.layer_id,) if is_full else ())


def route_any(
    original: Any, self: Any, q: Any = None, k: Any = None, v: Any = None, layer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    return original(seen_by(layer, self), q, k, v, layer, *args, **kwargs)


def route_one(original: Any, self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(seen_by(layer, self), layer, *args, **kwargs)


FIX = Fix(
    upstream=tuple(f"https://github.com/sgl-project/sglang/pull/{number}" for number in (26474, 26623, 27116, 27120)),
    probe=probe,
    patches=(
        PatchPoint((LINEAR_BACKEND,), How.AFTER, note_what_ids_do_not_tell),
        PatchPoint((ROUTE,), How.AROUND, route, needed=asks_one_method),
        PatchPoint(OLD_ROUTES[:1], How.AROUND, route_any, needed=asks_three_methods),
        PatchPoint(OLD_ROUTES[1:2], How.AROUND, route_one, needed=asks_three_methods),
        PatchPoint(OLD_ROUTES[2:], How.AROUND, route_one, needed=asks_three_methods),
    ),
    default="off",
    concerns=wrong(HYBRID, MODEL_OF_YOUR_OWN),
)
