# SPDX-License-Identifier: Apache-2.0
"""Find a model's stack of layers, the part that a prefill graph can replay for any number of requests.

Decided by structure. Names differ from model to model: `model`, `language_model.model`, `transformer`, `thinker.model`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

POSITIONS = ("positions", "position_ids")
EMBEDDINGS = ("input_embeds", "inputs_embeds")
# matched by name too: an lm_head or a score may be an ordinary linear layer
TAIL_NAMES = frozenset({"lm_head", "logits_processor", "pooler", "score"})
# not ParallelLMHead: SGLang never calls one, it only holds weights, and ChatGLM has it next to its layers
TAIL_CLASSES = ("LogitsProcessor", "Pooler")


class Unresolved(Exception):
    """Raised when no module, or more than one, can be the stack of layers; says which and why."""


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The module that runs all layers, and where it is in the model."""

    path: str
    module: Module


def resolve(model: Module, attention_layers: Iterable[Module | None]) -> LayerStack:
    """Find the one stack that holds these attention layers; raises Unresolved."""
    wanted = {id(layer) for layer in attention_layers if layer is not None}
    if not wanted:
        raise Unresolved(f"{type(model).__name__} has no attention layers that SGLang knows of")
    modules = dict(model.named_modules())
    survivors: dict[int, LayerStack] = {}
    refused = []
    for path in carriers(modules, wanted):
        try:
            stack = innermost_callable(modules, path)
        except Unresolved as reason:
            refused.append(str(reason))
        else:
            survivors[id(stack.module)] = stack
    if len(survivors) == 1:
        return next(iter(survivors.values()))
    if survivors:
        found = " and ".join(stack.path or "the model itself" for stack in survivors.values())
        raise Unresolved(f"{type(model).__name__}: each of {found} could be the stack of layers")
    raise Unresolved("; ".join(refused) or f"{type(model).__name__}: no list of layers holds all its attention layers")


def first_layer_of_experts(model: Module) -> float:
    """Number of the first layer that sends each token to some of its experts; infinite if there is none."""
    paths = (name.split(".") for name, _ in model.named_modules())
    numbers = (next(filter(str.isdigit, path), None) for path in paths if path[-1] == "experts")
    return min((int(number) for number in numbers if number), default=math.inf)


def carriers(modules: dict[str, Module], wanted: set[int]) -> Iterator[str]:
    """Paths of the modules with a list of layers that holds all of the wanted ones."""
    from torch import nn

    for path, module in modules.items():
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and wanted <= {id(part) for part in child.modules()}:
                yield path


def innermost_callable(modules: dict[str, Module], path: str) -> LayerStack:
    """Return this module, or the nearest one above that takes a batch and computes no logits."""
    start = path
    while True:
        module = modules[path]
        tail = next(tail_parts(module), None)
        if tail is not None:
            reason = f"{path or 'the model itself'} has {tail} in it"
            raise Unresolved(reason if path == start else f"{start} cannot be called with a batch, and {reason}")
        stack = as_stack(path, module)
        if stack:
            return stack
        if not path:
            where = start or "the model itself"
            raise Unresolved(f"nothing from {where} upwards takes input_ids, positions and forward_batch alone")
        path = path.rpartition(".")[0]


def as_stack(path: str, module: Module) -> LayerStack | None:
    """Return the module as a stack, if it can be called with input_ids, positions and forward_batch alone."""
    # the class's own: the instance may hold a replacement
    parameters = inspect.signature(type(module).forward).parameters
    needed = {
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    positions = next((name for name in POSITIONS if name in parameters), None)
    # DeepSeek-V4's have no default: for a batch of tokens they are None
    embeddings = next((name for name in EMBEDDINGS if name in needed), None)
    if positions is None or not {"input_ids", "forward_batch"} <= set(parameters):
        return None
    if not needed <= {"self", "input_ids", positions, "forward_batch", embeddings}:
        return None
    return LayerStack(path, module)


def tail_parts(module: Module) -> Iterator[str]:
    """Parts that turn hidden states into logits or pooled vectors: they depend on the number of requests."""
    for path, part in module.named_modules():
        if path.rpartition(".")[2] in TAIL_NAMES or type(part).__name__.endswith(TAIL_CLASSES):
            yield path
