# SPDX-License-Identifier: Apache-2.0
"""The options of an SGLang's command line, from the source of its parser."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

# a field of a class is an option where this describes it, and its name is the value that the option sets
DESCRIBED, DESCRIPTION = ("A", "Annotated"), "Arg"
# the method with the other options
ADDING = "add_cli_args"
NEGATED = "BooleanOptionalAction"


def options_in(module: ast.Module) -> dict[str, str]:
    """Each option, and the name of the value that it sets.

    Options that set the same one are spellings of each other, or stand for one of its words: the last one counts.
    """
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return {option: value for each in classes for node in each.body for option, value in options_of(node)}


def options_of(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef) and node.name == ADDING:
        for call in filter(adds, ast.walk(node)):
            assert isinstance(call, ast.Call)
            settings = settings_of(call)
            names = [name for name in map(word_of, call.args) if name.startswith("--")]
            if names:
                yield from named(names, word_of(settings.get("dest")) or value_of(names[0]), settings)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        of_field = described(node.annotation)
        if of_field is not None and not is_true(of_field.get("no_cli")):
            field = node.target.id
            first = word_of(of_field.get("cli_name")) or f"--{field.replace('_', '-')}"
            others = of_field.get("aliases")
            aliases = [word_of(each) for each in others.elts] if isinstance(others, ast.List) else []
            yield from named([first, *aliases], field, of_field)


def adds(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"


def named(names: list[str], value: str, settings: Mapping[str, ast.expr]) -> Iterator[tuple[str, str]]:
    action = settings.get("action")
    for name in names:
        yield name, value
        if isinstance(action, ast.Attribute) and action.attr == NEGATED:
            yield f"--no-{name.removeprefix('--')}", value


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
