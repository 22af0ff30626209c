# SPDX-License-Identifier: Apache-2.0
"""The module that the resolver takes for the stack of layers: a toy for each rule, and each rule is needed."""

from __future__ import annotations

import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from torch import nn

from sglang_bcg_fixes.anatomy import layer_stack


class Attention(nn.Module):
    pass


class LogitsProcessor(nn.Module):
    pass


class ParallelLMHead(nn.Module):
    """SGLang's holds weights and refuses to be called."""


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.self_attn = attention or Attention()


class Parts(nn.Module):
    """A module with these children, that runs hidden states and cannot be called with a batch."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, hidden_states: Any, forward_batch: Any) -> Any:
        raise NotImplementedError


class Stack(Parts):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


class OtherOrder(Parts):
    def forward(self, input_ids: Any, forward_batch: Any, position_ids: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class EmbeddingsAskedFor(Parts):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, inputs_embeds: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Stage(Parts):
    """Needs more than a batch."""

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, hidden_states: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class Embeddings(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 2)


class Case(NamedTuple):
    model: nn.Module
    # a pattern of the path, or of the refusal
    expected: str
    attention: Iterable[nn.Module | None] | None = None


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def causal(model: nn.Module, **others: nn.Module) -> Stack:
    return Stack(**others, model=model, lm_head=nn.Linear(2, 4), logits_processor=LogitsProcessor())


def plain() -> Case:
    return Case(causal(Stack(layers=blocks())), "model")


def lists_in_lists() -> Case:
    return Case(causal(Stack(groups=nn.ModuleList([Parts(layers=blocks()), Parts(layers=blocks())]))), "model")


def one_list_in_another() -> Case:
    return Case(causal(Stack(groups=nn.ModuleList([Parts(layers=blocks())]))), "model")


def a_dictionary_of_layers() -> Case:
    return Case(causal(Stack(layers=nn.ModuleDict({"0": Block(), "1": Block()}))), "model")


def a_vision_tower() -> Case:
    tower, text = Stack(layers=blocks()), Stack(layers=blocks())
    return Case(causal(text, visual=tower), "model", attention_in(text))


def placeholders_of_other_stages() -> Case:
    model = causal(Stack(layers=nn.ModuleList([nn.Identity(), Block(), Block(), nn.Identity()])))
    return Case(model, "model", [None, *attention_in(model), None])


def layers_without_attention() -> Case:
    mamba = Parts(mixer=nn.Linear(2, 2))
    model = causal(Stack(layers=nn.ModuleList([mamba, Block(), Parts(mixer=nn.Linear(2, 2))])))
    # where a layer runs in a break as a whole, SGLang counts the layer itself
    return Case(model, "model", [mamba, *attention_in(model), None])


def layers_that_only_their_parent_can_call() -> Case:
    encoder = Parts(layers=blocks())
    return Case(Parts(transformer=OtherOrder(encoder=encoder), logits_processor=LogitsProcessor()), "transformer")


def a_head_that_only_holds_weights() -> Case:
    transformer = OtherOrder(encoder=Parts(layers=blocks()), output_layer=ParallelLMHead())
    return Case(Parts(transformer=transformer, logits_processor=LogitsProcessor()), "transformer")


def embeddings_without_a_default() -> Case:
    return Case(causal(EmbeddingsAskedFor(layers=blocks())), "model")


def a_wrapper_that_can_be_called_too() -> Case:
    return Case(causal(Stack(language_model=Stack(layers=blocks()))), "model.language_model")


def a_tied_head() -> Case:
    embeddings = Embeddings()
    model = Stack(lm_head=embeddings, model=Stack(embed_tokens=embeddings, layers=blocks()))
    return Case(model, "model")


def its_own_logits() -> Case:
    return Case(Parts(model=Stack(layers=blocks(), sampler=LogitsProcessor())), "refused: model has sampler in it")


def its_own_linear_head() -> Case:
    return Case(Parts(model=Stack(layers=blocks(), score=nn.Linear(2, 4))), "refused: model has score in it")


def only_the_whole_model_can_be_called() -> Case:
    return Case(
        causal(Parts(layers=blocks())),
        "refused: model cannot be called with a batch, and the model itself has lm_head in it",
    )


def more_is_needed_than_a_batch() -> Case:
    return Case(Parts(model=Stage(layers=blocks())), "refused: nothing from model upwards takes.*")


def two_candidates() -> Case:
    layers = blocks()
    return Case(Parts(model=Stack(layers=layers), other=Stack(layers=layers)), "refused: .*each of model and other.*")


def attention_in_two_lists() -> Case:
    return Case(causal(Stack(fast=blocks(), slow=blocks())), "refused: Stack: no list of layers holds all.*")


def no_attention() -> Case:
    return Case(causal(Stack(layers=nn.ModuleList([nn.Linear(2, 2)]))), "refused: Stack has no attention layers.*")


def only_other_stages_attention() -> Case:
    return Case(causal(Stack(layers=blocks())), "refused: Stack has no attention layers.*", [None, None])


def a_forward_put_over_the_class() -> Case:
    stack = Stack(layers=blocks())
    setattr(stack, "forward", lambda *args, **kwargs: None)  # noqa: B010
    return Case(causal(stack), "model")


CASES = (
    plain,
    lists_in_lists,
    one_list_in_another,
    a_dictionary_of_layers,
    a_vision_tower,
    placeholders_of_other_stages,
    layers_without_attention,
    layers_that_only_their_parent_can_call,
    a_head_that_only_holds_weights,
    embeddings_without_a_default,
    a_wrapper_that_can_be_called_too,
    a_tied_head,
    its_own_logits,
    its_own_linear_head,
    only_the_whole_model_can_be_called,
    more_is_needed_than_a_batch,
    two_candidates,
    attention_in_two_lists,
    no_attention,
    only_other_stages_attention,
    a_forward_put_over_the_class,
)
# what a rule could be replaced with, and the toy that needs the rule
MUTANTS: dict[str, tuple[str, str, Callable[[], Case]]] = {
    "any list": (" and wanted <= {id(part) for part in child.modules()}", "", a_vision_tower),
    "a list of some attention layers": ("wanted <= {", "wanted & {", attention_in_two_lists),
    "a list alone": ("nn.ModuleList | nn.ModuleDict", "nn.ModuleList", a_dictionary_of_layers),
    "the outermost": ("if stack:", 'if stack and "." not in path:', a_wrapper_that_can_be_called_too),
    "never the parent": ('path = path.rpartition(".")[0]', "raise Unresolved(path)", a_head_that_only_holds_weights),
    "logits or not": ("if tail is not None:", "if False:", its_own_logits),
    "logits by name alone": (" or type(part).__name__.endswith(TAIL_CLASSES)", "", its_own_logits),
    "logits by class alone": ('path.rpartition(".")[2] in TAIL_NAMES or ', "", its_own_linear_head),
    "heads by class": ('"Pooler")', '"Pooler", "ParallelLMHead")', a_head_that_only_holds_weights),
    "heads wherever they are": ("tail_parts(module)", 'tail_parts(modules[""])', a_tied_head),
    "whatever stands on the instance": ("type(module).forward", "module.forward", a_forward_put_over_the_class),
    "any further parameter": ("if not needed <= {", "if not needed & {", more_is_needed_than_a_batch),
    "positions alone": ('"positions", "position_ids"', '"positions",', layers_that_only_their_parent_can_call),
    "no embeddings": ("if name in needed), None)", "if not name), None)", embeddings_without_a_default),
    "the first of two": ("if len(survivors) == 1:", "if survivors:", two_candidates),
    "every list for itself": ("survivors[id(stack.module)]", "survivors[path]", one_list_in_another),
    "no attention asked for": ("if not wanted:", "if False:", no_attention),
    "placeholders as layers": (" if layer is not None}", "}", placeholders_of_other_stages),
}


def attention_in(model: nn.Module) -> list[nn.Module | None]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def answer(resolver: Any, case: Case) -> str:
    attention = attention_in(case.model) if case.attention is None else case.attention
    try:
        stack = resolver.resolve(case.model, attention)
    except resolver.Unresolved as reason:
        return f"refused: {reason}"
    assert case.model.get_submodule(stack.path) is stack.module
    path: str = stack.path
    return path


def is_right(resolver: Any, case: Case) -> bool:
    return re.fullmatch(case.expected, answer(resolver, case)) is not None


@pytest.fixture
def mutated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], types.ModuleType]:
    """The resolver with a piece of its text replaced."""

    def make(old: str, new: str) -> types.ModuleType:
        text = pathlib.Path(layer_stack.__file__).read_text()
        assert text.count(old) == 1, f"layer_stack.py has no {old!r}, or more than one"
        module = types.ModuleType("mutated_layer_stack")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text.replace(old, new), layer_stack.__file__, "exec"), vars(module))
        return module

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_stack_is_found_or_refused_with_a_reason(case: Callable[[], Case]) -> None:
    made = case()
    assert is_right(layer_stack, made), answer(layer_stack, made)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_a_rule_its_toy_is_wrong(mutated: Callable[[str, str], types.ModuleType], mutant: str) -> None:
    old, new, case = MUTANTS[mutant]
    assert not is_right(mutated(old, new), case())
