"""A hybrid model's layers go to the wrong attention

Symptom: Up to 0.5.13.post1, with --speculative-adaptive and a draft that is part of the same checkpoint, a hybrid
model (Qwen3-Next, Qwen3.5, NemotronH, Bailing) crashes at start-up or computes some layers with the wrong attention,
silently. Builds between 0.5.12.post1 and 0.5.13 crash with Ring and Ling ("layer_id=0 not in full attention layers").
No released model has been seen to fail on later releases: a draft whose only attention layer is not its layer 0 would.
Cause: Layers are routed by membership of their id in one list. Up to 0.5.13.post1 get_config is cached, so the target
and the draft share one configuration object; the draft changes it, and when the target's backend is built again from
it, the list is the draft's. From 0.5.13 on a draft's list is [0], whatever its layers are.
Change: Up to 0.5.13.post1 a draft gets its own copy of the configuration. In every release RadixLinearAttention, and
the linear layers of Bailing and MiniCPM, which are made of RadixAttention, go to linear attention; a draft's other
RadixAttention layers go to full attention; what remains is routed by id, as before.
Remove when: SGLang routes by the kind of the layer and no release before 0.5.14 has to be served.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from sglang_bcg_fixes.model import Finding, Fix, How, Mitigation, PatchPoint
from sglang_bcg_fixes.probe import Definition, Source, affected, unknown

CONFIG = "sglang.srt.configs.model_config:ModelConfig"
# processes that never run a model have its configuration too; naming the runner's keeps their imports as they are
RUNNERS_CONFIG = "sglang.srt.model_executor.model_runner:ModelConfig"
CACHED = "sglang.srt.utils.hf_transformers.config:get_config"
MODULE = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
ROUTE = f"{MODULE}:HybridLinearAttnBackend._is_full_attn"
# before there was one method to ask, each of these looked the id up itself
OLD_ROUTES = tuple(
    f"{MODULE}:HybridLinearAttnBackend.{name}" for name in ("forward", "forward_decode", "forward_extend")
)
LINEAR_BACKEND = f"{MODULE}:MambaAttnBackendBase.__init__"
# linear attention whose `attn` is a RadixAttention, which elsewhere is full attention
LINEAR_OF_PLAIN_LAYERS = (
    "sglang.srt.models.bailing_moe_linear:BailingMoELinearAttention",
    "sglang.srt.models.minicpm:MiniCPMLightningMixer",
)
MARK = "_is_linear_attention"
# all that any known way of routing looks at; the guard looks at all of it too, so it can take the place of each
LOOKED_AT = {"self", "full_attn_layers", "layer", "layer_id", "isinstance", "getattr", MARK}
KINDS = {"RadixLinearAttention", "RadixAttention"}


def probe(source: Source) -> Finding:
    own = source.need(f"{CONFIG}.__init__")
    read = [own.need_assignment_to("self.hf_config"), own.need_assignment_to("self.hf_text_config")]
    read += [
        source.need(f"{where}.__init__").need_assignment_to("self.attn")
        for where in LINEAR_OF_PLAIN_LAYERS
        if source.find(where)
    ]
    read.append(source.need(LINEAR_BACKEND).header)
    found = []
    if shares_configuration(source):
        if not copy_would_be_in_time(own):
            return unknown("the draft's configuration is changed before it can be copied", own)
        read += [source.need(f"{CONFIG}._config_draft_model").header, source.need(CACHED)]
        found.append("the target and the draft share one cached configuration object")
    elif "copy.deepcopy" not in read[0].calls:
        return unknown("the configuration is made in a way that no known release does", own)
    if asks_three_methods(source):
        read += [source.need(where) for where in OLD_ROUTES]
        found.append("layers are routed by id, whatever kind they are")
        return affected(", and ".join(found), *read)
    route = source.need(ROUTE)
    looked_at = words_in(route)
    if not looked_at <= LOOKED_AT | KINDS:
        return unknown(f"layers are routed by {', '.join(sorted(looked_at - LOOKED_AT - KINDS))} too", route)
    by = "kind, which not every linear layer shows" if looked_at & KINDS else "id, whatever kind they are"
    return affected(", and ".join([*found, f"layers are routed by {by}"]), *read, route.header)


def shares_configuration(source: Source) -> bool:
    made = source.need(f"{CONFIG}.__init__").need_assignment_to("self.hf_config")
    cached = any("lru_cache" in item for item in source.need(CACHED).decorators)
    return cached and "get_config" in made.calls and "copy.deepcopy" not in made.calls


def copy_would_be_in_time(init: Definition) -> bool:
    """Whether both configurations are there when the draft begins to change them."""
    changes = [
        node.lineno
        for node in ast.walk(init.node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._config_draft_model"
    ]
    made = [init.need_assignment_to(name).node.lineno for name in ("self.hf_config", "self.hf_text_config")]
    return len(changes) == 1 and max(made) < changes[0]


def asks_one_method(source: Source) -> bool:
    return source.find(ROUTE) is not None


def asks_three_methods(source: Source) -> bool:
    return not asks_one_method(source)


def words_in(function: Definition) -> set[str]:
    """Every name in its body and decorators, also one that is given as a string: nothing that decides can hide."""
    assert isinstance(function.node, ast.FunctionDef)
    statements = [*function.node.body, *function.node.decorator_list]
    nodes = [node for statement in statements for node in ast.walk(statement)]
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (
        {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {text for text in strings if text.isidentifier()}
    )


def give_the_draft_its_own(self: Any) -> None:
    if self.is_draft_model:
        # together: one is the other or a part of it, and stays so
        self.hf_config, self.hf_text_config = copy.deepcopy((self.hf_config, self.hf_text_config))


def note_what_ids_do_not_tell(result: None, self: Any, model_runner: Any) -> None:
    """Whose layers will come, and which of them are linear and do not look it.

    Models are not patched for this: that would import them, and one that cannot be imported is no fault of the others.
    """
    self.is_draft_worker = model_runner.is_draft_worker
    model = getattr(model_runner, "model", None)
    for module in model.modules() if model is not None else ():
        if any(f"{kind.__module__}:{kind.__qualname__}" in LINEAR_OF_PLAIN_LAYERS for kind in type(module).__mro__):
            setattr(module.attn, MARK, True)


def belongs_to_full(backend: Any, layer: Any) -> bool:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    # this runs for every layer of an eager step: what a torch module does not have is slow to ask for with getattr
    if isinstance(layer, RadixLinearAttention) or vars(layer).get(MARK):
        return False
    # a linear backend of somebody else's may not derive from SGLang's, which knows whether it serves a draft
    if getattr(backend.linear_attn_backend, "is_draft_worker", False):
        from sglang.srt.layers.radix_attention import RadixAttention

        if isinstance(layer, RadixAttention):
            return True
    # never "full" for every RadixAttention of a target: models outside of SGLang make linear layers of it, unmarked
    is_full: bool = layer.layer_id in backend.full_attn_layers
    return is_full


def route(original: Any, self: Any, layer: Any, layer_id: int | None = None) -> Any:
    return original(self, layer, layer_id) if layer is None else belongs_to_full(self, layer)


class Rerouted:
    """A backend as one call sees it: with another list of full attention layers, and in everything else itself."""

    def __init__(self, backend: Any, full_attn_layers: tuple[int, ...]) -> None:
        self.backend = backend
        self.full_attn_layers = full_attn_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def seen_by(layer: Any, backend: Any) -> Any:
    """The backend itself, unless its list of ids would send this layer to the wrong attention."""
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
    id="hybrid_layer_misrouted",
    doc=__doc__,
    upstream=tuple(
        f"https://github.com/sgl-project/sglang/pull/{number}" for number in (23331, 26474, 26623, 27116, 27120)
    ),
    probe=probe,
    known={
        "513ee25e9b81": "ModelConfig.__init__'s self.hf_config, 0.5.11",
        "ead51f2fcc25": "ModelConfig.__init__'s self.hf_text_config, 0.5.11 to 0.5.23",
        "67a6ff35997d": "BailingMoELinearAttention.__init__'s self.attn, 0.5.11 to 0.5.23",
        "8934b0c62720": "MambaAttnBackendBase.__init__'s header, 0.5.11 to 0.5.23",
        "22fd0128d59e": "ModelConfig._config_draft_model's header, 0.5.11 to 0.5.13.post1",
        "23d16644cbcb": "get_config, 0.5.11",
        "8b4740998d5e": "HybridLinearAttnBackend.forward, 0.5.11 to 0.5.12.post1",
        "d1f81f1a9010": "HybridLinearAttnBackend.forward_decode, 0.5.11 to 0.5.12.post1",
        "2ac4c4be446f": "HybridLinearAttnBackend.forward_extend, 0.5.11 to 0.5.12.post1",
        "75aaecbd1913": "ModelConfig.__init__'s self.hf_config, 0.5.12 to 0.5.13.post1",
        "b74706995543": "get_config, 0.5.12 to 0.5.13.post1",
        "1bd47abca37b": "HybridLinearAttnBackend._is_full_attn's header, 0.5.13 to 0.5.23",
        "04e7de28dca1": "ModelConfig.__init__'s self.hf_config, 0.5.14 to 0.5.23",
        "b6e2d09c6435": "MiniCPMLightningMixer.__init__'s self.attn, 0.5.19 to 0.5.23",
    },
    patches=(
        PatchPoint(
            where=(f"{RUNNERS_CONFIG}._config_draft_model",),
            how=How.BEFORE,
            body=f"{__name__}:give_the_draft_its_own",
            needed=shares_configuration,
        ),
        PatchPoint((LINEAR_BACKEND,), How.AFTER, f"{__name__}:note_what_ids_do_not_tell"),
        PatchPoint((ROUTE,), How.AROUND, f"{__name__}:route", needed=asks_one_method),
        PatchPoint(OLD_ROUTES[:1], How.AROUND, f"{__name__}:route_any", needed=asks_three_methods),
        PatchPoint(OLD_ROUTES[1:2], How.AROUND, f"{__name__}:route_one", needed=asks_three_methods),
        PatchPoint(OLD_ROUTES[2:], How.AROUND, f"{__name__}:route_one", needed=asks_three_methods),
    ),
    mitigations=(
        Mitigation(
            flags="(leave out) --speculative-algorithm; up to 0.5.13.post1 --speculative-adaptive is enough",
            option="--speculative-algorithm",
            effect="without a draft every list of ids is right; otherwise the target's is made before there is a draft",
        ),
    ),
    verify=("qwen3_next_adaptive_speculation",),
)
