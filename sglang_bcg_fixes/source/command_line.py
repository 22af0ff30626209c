# SPDX-License-Identifier: Apache-2.0
"""A parser that refuses what an SGLang's own command line refuses, made of its source: nothing of SGLang is imported.

It knows the options' names, types, choices and numbers of words. What only a running SGLang can say of an option is not
checked, and neither is what SGLang refuses later, when it looks at all options together.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sglang_bcg_fixes.source import graph_settings
from sglang_bcg_fixes.source.options import Option, declared, is_true, word_of
from sglang_bcg_fixes.source.tree import Source

TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "json.loads": json.loads}
# SGLang's own actions that take no word, unless they are declared with one
WITHOUT_WORD = ("DeprecatedAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction")
WITH_A_WORD = ("DeprecatedAliasStoreAction",)
LISTS = ("List", "list", "Sequence")


class RefusedError(Exception):
    """SGLang's parser would refuse this command; the words are argparse's."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message)


def check(source: Source, words: Sequence[str], with_choices: bool = True) -> None:
    """Raise what SGLang's parser would say; other plugins may add choices, so these can be left out."""
    if not source.has_option("--model-path"):
        # it declares them elsewhere, so nobody knows what it would refuse
        return
    parser_of(source, with_choices).parse_args(words)


def parser_of(source: Source, with_choices: bool = True) -> Parser:
    parser = Parser(prog="sglang serve", add_help=False)
    trees = source.trees_of_options()
    lists = {name: words for tree in (*trees, *source.trees_of_choices()) for name, words in lists_in(tree)}
    seen: set[str] = set()
    for option in (option for tree in trees for option in declared(tree)):
        names = [name for name in option.names if name not in seen]
        seen.update(option.spellings)
        if names:
            settings = arguments_of(option, lists if with_choices else {})
            if graph_settings.OPTION in names:
                settings["type"] = functools.partial(graph_settings.read, source)
            parser.add_argument(*names, dest=option.value, **settings)
    return parser


def lists_in(tree: ast.Module) -> list[tuple[str, list[str]]]:
    """The lists of words that a module gives a name."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            words = words_in(node.value, {})
            if words is not None:
                found.append((node.targets[0].id, words))
    return found


def words_in(node: ast.expr | None, lists: dict[str, list[str]]) -> list[Any] | None:
    """The items of a list that the source spells out, or None."""
    if isinstance(node, ast.List | ast.Tuple) and all(isinstance(each, ast.Constant) for each in node.elts):
        return [each.value for each in node.elts if isinstance(each, ast.Constant)]
    return lists.get(node.id) if isinstance(node, ast.Name) else None


def arguments_of(option: Option, lists: dict[str, list[str]]) -> dict[str, Any]:
    """The keywords for argparse."""
    settings = option.settings
    if option.is_negatable:
        return {"action": argparse.BooleanOptionalAction}
    if "action" in settings:
        return of_action(option, lists)
    if option.annotation is not None:
        return of_annotation(option, lists)
    needed = {"required": True} if is_true(settings.get("required")) else {}
    return {**of_settings(option, lists), **needed}


def of_settings(option: Option, lists: dict[str, list[str]]) -> dict[str, Any]:
    settings = option.settings
    return {**of_words(settings.get("nargs")), **of_type(settings.get("type")), **of_choices(option, lists)}


def of_action(option: Option, lists: dict[str, list[str]]) -> dict[str, Any]:
    action = option.settings["action"]
    name = word_of(action) or ast.unparse(action).rpartition(".")[2]
    if "nargs" in option.settings or name in WITH_A_WORD:
        return of_settings(option, lists)
    if name in ("store_true", "store_false") or name in WITHOUT_WORD:
        return {"action": "store_true"}
    # one of SGLang's own that is not known here
    return {"nargs": "*"}


def of_annotation(option: Option, lists: dict[str, list[str]]) -> dict[str, Any]:
    kind = without_none(option.annotation)
    settings = option.settings
    needed = {"required": True} if option.is_required else {}
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Literal":
        choices = words_in(settings.get("choices"), lists) or words_in(kind.slice, {}) or words_in_one(kind.slice)
        return {"choices": choices, **needed} if choices else needed
    if "type_parser" in settings:
        return {**of_words(settings.get("nargs")), **of_type(settings["type_parser"]), **needed}
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value).rpartition(".")[2] in LISTS:
        words = of_words(settings.get("nargs")) or {"nargs": "+"}
        return {**words, **of_type(kind.slice), **of_choices(option, lists), **needed}
    if isinstance(kind, ast.Name) and kind.id == "bool":
        return {"action": "store_true"}
    return {**of_words(settings.get("nargs")), **of_type(kind), **of_choices(option, lists), **needed}


def words_in_one(node: ast.expr) -> list[Any] | None:
    return [node.value] if isinstance(node, ast.Constant) else None


def without_none(node: ast.expr | None) -> ast.expr | None:
    """The type of a value that may be None."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Optional":
        return node.slice
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value is None:
        return node.left
    return node


def of_words(node: ast.expr | None) -> dict[str, Any]:
    value = node.value if isinstance(node, ast.Constant) else None
    return {"nargs": value} if value is not None else {}


def of_type(node: ast.expr | None) -> dict[str, Any]:
    known = TYPES.get(ast.unparse(node)) if node is not None else None
    return {"type": known} if known else {}


def of_choices(option: Option, lists: dict[str, list[str]]) -> dict[str, Any]:
    node = option.settings.get("choices")
    named = words_in(node, lists) if lists or isinstance(node, ast.List | ast.Tuple) else None
    return {"choices": named} if named else {}
