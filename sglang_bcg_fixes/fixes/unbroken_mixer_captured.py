# SPDX-License-Identifier: Apache-2.0
"""A recurrent model of your own, or DeepSeek-V3.2, may answer wrongly with prefill graphs

Symptom: A model whose mixer has no graph break (one of your own, or one that a later release adds, as Falcon-H1 was)
answers wrongly with HTTP 200: every replay computes with the state of the dummy batch. So does DeepSeek-V3.2 from
0.5.11 to 0.5.14, if breakable graphs are chosen explicitly and it does not stop at start-up: its indexer is captured,
and each replay attends to the tokens selected by the dummy batch's lengths.
Cause: The prefill runner checks that each layer has attention. It does not check whether a mixer next to it, which
keeps a state from token to token, or an indexer, which chooses what attention sees, runs in a break of the graph.
Change: Before anything is captured, the model's modules are walked. A module whose code reaches the store of recurrent
states, and that neither has a break nor is below one that has, is refused, and so is an indexer that knows nothing of
breakable graphs: no prefill graph is captured for this model, prefill runs eagerly, and one warning names the module. A
module that only names the linear attention backend is not refused where a module below it handles the states in a
break. Mixers that SGLang or a fix of this package breaks are captured as before. With the flag off, every model is
captured as SGLang would. From 0.5.15 no model that SGLang ships is captured in this way; the guard stays, for models
that are not written yet.
Remove when: Every release that has to be served refuses such a mixer itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import MODEL_OF_YOUR_OWN, PREFILL_GRAPHS, SPARSE
from sglang_bcg_fixes.anatomy.refusals import refusing
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break, slots, wrappers
from sglang_bcg_fixes.source.tree import files_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, latent, wrong

if TYPE_CHECKING:
    from torch.nn import Module

CAPTURE = (f"{PREFILL}.capture", f"{OLD_PREFILL}._warmup")
# from 0.5.17 all ranks vote by the first one, which the second one calls
MAY_REPLAY = (f"{PREFILL}.can_replay_locally", f"{PREFILL}.can_run_graph", f"{OLD_PREFILL}.can_run")

# names found only in code that handles recurrent states
STATES = frozenset({"conv_state_metadata", "mamba2_layer_cache", "sconv_state", "short_conv_layer_cache"})
BACKEND = "linear_attn_backend"
# calls of code that chooses, by the batch's lengths, which tokens attention will see
CHOICE = "get_indexer_metadata"
# modules of that question; where both exist, the older forwards to the newer
INDEXERS = ("sglang.srt.layers.attention.dsa.dsa_indexer", "sglang.srt.layers.attention.nsa.nsa_indexer")
# calls on that backend by code that handles the states itself
BESIDE_FORWARD = frozenset({"forward_metadata", *STATES})
# fixes that add a break
BREAKING = frozenset({"hybrids_without_graphs", "linear_attention_captured", "ssm_mixer_captured"})


def probe(source: Source) -> Finding:
    read = [source.need(*CAPTURE), source.need(*MAY_REPLAY)]
    if is_old(source):
        read.append(source.need(f"{OLD_PREFILL}._capture_all"))
    reason = "the runner captures a model's layers and asks none of them for a break"
    indexer = next(filter(source.has_module, INDEXERS), None)
    if indexer and not knows_breakable_graphs(source, indexer):
        return affected(f"{reason}, and {indexer} has none", *read)
    return latent(f"{reason}; every model of this release has one, or is not captured", *read)


def knows_breakable_graphs(source: Source, module: str) -> bool:
    """Search the text: a guard that asked for a known form would be off in the next release."""
    return any("breakable" in (source.text(path) or "") for path in files_of(module))


def is_old(source: Source) -> bool:
    return source.find(f"{OLD_PREFILL}._warmup") is not None


def unbroken_mixers(model: Module, linear_backend: Any) -> Iterator[str]:
    """Paths of the modules whose state a capture would freeze."""
    kinds = {type(module) for module in model.modules()}
    breaking = {kind for kind in kinds if has_break(kind, linear_backend)}
    stateful = {kind for kind in kinds if handles_states(kind)}
    asking = {kind for kind in kinds - stateful if BACKEND in names_in(kind)}
    broken: list[str] = []
    for path, module in model.named_modules():
        kind = type(module)
        if kind in breaking or any(map(is_break, vars(module).values())):
            broken.append(f"{path}.")
        elif path.startswith(tuple(broken)):
            continue
        elif kind in stateful or (kind in asking and not hands_states_on(module, stateful & breaking)):
            yield f"{path} ({kind.__name__})"


def handles_states(kind: type[Module]) -> bool:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    names = names_in(kind)
    if issubclass(kind, RadixLinearAttention) or not names.isdisjoint(STATES):
        return True
    # a class that asks for breakable graphs was written for them; it imports its break where it calls it
    return CHOICE in names and not any("breakable" in name for name in names)


def hands_states_on(module: Module, handled_in_a_break: set[type[Module]]) -> bool:
    """Tell whether a module below handles the states in a break; the backend's name is then just an option here.

    Qwen3.5's layer asks `linear_attn_backend == "intel_xpu"` and has its RadixLinearAttention do the work.
    """
    return any(type(part) in handled_in_a_break for part in module.modules())


def has_break(kind: type[Module], linear_backend: Any) -> bool:
    """Tell whether its code breaks the graph, or touches states only through a backend that does."""
    if is_break(kind.forward):
        return True
    names, classes = names_in(kind), classes_of(kind)
    scopes = [*map(vars, classes), *(vars(sys.modules[base.__module__]) for base in classes)]
    if any(is_break(scope.get(name)) for scope in scopes for name in names):
        return True
    return BACKEND in names and names.isdisjoint(BESIDE_FORWARD) and is_break(getattr(linear_backend, "forward", None))


def is_break(value: Any) -> bool:
    """Tell whether a call of this comes to a break, whatever stands round it: another fix, or another package."""
    function = slots.core(value)
    if not callable(function):
        return False
    return any(map(graph_break.is_product, wrappers.layers(function))) or bool(wrappers.fixes_in(function) & BREAKING)


def classes_of(kind: type) -> list[type]:
    """The class and its bases except torch's, which know nothing of states and have the most code."""
    return [
        base for base in kind.__mro__ if base.__module__ in sys.modules and not base.__module__.startswith("torch.")
    ]


def names_in(kind: type) -> set[str]:
    """Every name in the code of a class, and in the functions of its module that it calls.

    Reads compiled code instead of source: every class has it, and it takes no time.
    """
    names: set[str] = set()
    for base in classes_of(kind):
        for value in vars(base).values():
            add_names(names, slots.core(value), base.__module__)
    return names


def add_names(names: set[str], value: Any, module: str) -> None:
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, FunctionType):
        return
    new = set(names_in_code(function.__code__)) - names
    names |= new
    for called in map(function.__globals__.get, new):
        if isinstance(called, FunctionType) and called.__module__ == module and not is_break(called):
            add_names(names, called, module)


def names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from names_in_code(part)


def why_refused(runner: Any) -> str:
    model_runner = runner.model_runner
    linear_backend = getattr(model_runner.attn_backend, BACKEND, None)
    found = list(unbroken_mixers(model_runner.model, linear_backend))
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    return (
        f"{found[0]}{more} handles recurrent states, or chooses what attention sees, and no break of the graph is "
        f"known there: a replay would compute with what belongs to another batch"
    )


unless_refused, never_if_refused = refusing("unbroken_mixer_captured", why_refused)

FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint(CAPTURE, How.AROUND, unless_refused),
        PatchPoint((f"{OLD_PREFILL}._capture_all",), How.AROUND, unless_refused, needed=is_old),
        PatchPoint(MAY_REPLAY, How.AROUND, never_if_refused),
    ),
    guard=True,
    # wraps that fix's methods, which would look for layers in vain
    after=("single_request_capture",),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(PREFILL_GRAPHS, SPARSE | MODEL_OF_YOUR_OWN),
)
