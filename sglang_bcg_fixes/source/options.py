# SPDX-License-Identifier: Apache-2.0
"""The options of an SGLang's command line, from the source of its parser."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping

# a field of a class is an option where this describes it, and its name is the value that the option sets
DESCRIBED, DESCRIPTION = ("A", "Annotated"), "Arg"
# the method with the other options
ADDING = "add_cli_args"
NEGATED = "BooleanOptionalAction"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option as it is declared: its spellings, the value that it sets, and what the parser is given for it."""

    names: tuple[str, ...]
    value: str
    settings: Mapping[str, ast.expr]
    # of a field of a class: its type, and whether a command has to give it
    annotation: ast.expr | None = None
    is_required: bool = False

    @property
    def is_negatable(self) -> bool:
        action = self.settings.get("action")
        return isinstance(action, ast.Attribute) and action.attr == NEGATED

    @property
    def spellings(self) -> list[str]:
        negated = [f"--no-{name.removeprefix('--')}" for name in self.names] if self.is_negatable else []
        return [*self.names, *negated]


def options_in(module: ast.Module) -> dict[str, str]:
    """Each option, and the name of the value that it sets.

    Options that set the same one are spellings of each other, or stand for one of its words: the last one counts.
    """
    return {name: option.value for option in declared(module) for name in option.spellings}


def declared(module: ast.Module) -> Iterator[Option]:
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for node in (node for each in classes for node in each.body):
        if isinstance(node, ast.FunctionDef) and node.name == ADDING:
            yield from added(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield from of_field(node, node.target.id)


def added(function: ast.FunctionDef) -> Iterator[Option]:
    for call in filter(adds, ast.walk(function)):
        assert isinstance(call, ast.Call)
        settings = settings_of(call)
        names = tuple(name for name in map(word_of, call.args) if name.startswith("--"))
        if names:
            yield Option(names, word_of(settings.get("dest")) or value_of(names[0]), settings)


def of_field(node: ast.AnnAssign, field: str) -> Iterator[Option]:
    settings = described(node.annotation)
    if settings is None or is_true(settings.get("no_cli")):
        return
    assert isinstance(node.annotation, ast.Subscript) and isinstance(node.annotation.slice, ast.Tuple)
    first = word_of(settings.get("cli_name")) or f"--{field.replace('_', '-')}"
    others = settings.get("aliases")
    aliases = [word_of(each) for each in others.elts] if isinstance(others, ast.List) else []
    needed = node.value is None and "required" not in settings
    yield Option((first, *aliases), field, settings, node.annotation.slice.elts[0], needed)


def adds(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"


def described(annotation: ast.expr) -> dict[str, ast.expr] | None:
    """The settings of a field's option, none of them where a text describes it, or None for a field without one."""
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return None
    if not isinstance(annotation.value, ast.Name) or annotation.value.id not in DESCRIBED:
        return None
    for item in annotation.slice.elts[1:]:
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == DESCRIPTION:
            return settings_of(item)
        if isinstance(item, ast.JoinedStr) or word_of(item):
            return {}
    return None


def settings_of(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def value_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def word_of(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
