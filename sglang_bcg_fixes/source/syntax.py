# SPDX-License-Identifier: Apache-2.0
"""Definitions in syntax trees: text, calls, names, and a hash that does not depend on layout."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
from collections.abc import Iterator

from sglang_bcg_fixes.source.finding import Evidence

Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Drifted(Exception):
    """A definition that the probe needs is not where any release we know has it."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the GC: ASTs are 100k objects without a cycle, and each collection would scan them and torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse(text: str, path: str) -> ast.Module:
    with collector_paused():
        return ast.parse(text, path)


def canonical(node: object) -> object:
    """A syntax tree as nested tuples that leave out what does not change behaviour.

    Docstrings, positions and empty fields go, so the result is the same in every version of Python.
    """
    if isinstance(node, ast.AST):
        fields: list[object] = []
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "kind", "type_comment") or value is None or value == []:
                continue
            if name == "body" and isinstance(value, list) and is_docstring(value[0]):
                value = value[1:]
            if isinstance(node, ast.JoinedStr):
                # some releases of python 3.12 end a format with an empty piece
                value = [piece for piece in value if not (isinstance(piece, ast.Constant) and piece.value == "")]
            fields.append((name, canonical(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(canonical(item) for item in node)
    return repr(node)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Definition:
    """One named piece of a module: a class, a function, a method or an assignment."""

    def __init__(self, where: str, file: str, node: Named) -> None:
        self.where = where
        self.file = file
        self.node = node

    @functools.cached_property
    def form(self) -> str:
        """A hash of what the definition does, the same in every version of Python."""
        return hashlib.sha256(repr(canonical(self.node)).encode()).hexdigest()[:12]

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.where, self.file, self.node.lineno, self.form)

    @functools.cached_property
    def text(self) -> str:
        return ast.unparse(self.node)

    @functools.cached_property
    def calls(self) -> frozenset[str]:
        """The dotted names that it calls: {"torch.empty", "self.attn", ...}."""
        return frozenset(ast.unparse(node.func) for node in ast.walk(self.node) if isinstance(node, ast.Call))

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return ()
        args = self.node.args
        return tuple(arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))

    @functools.cached_property
    def decorators(self) -> tuple[str, ...]:
        return tuple(ast.unparse(node) for node in getattr(self.node, "decorator_list", ()))

    def mentions(self, text: str) -> bool:
        """Tell whether its code, written by `ast.unparse`, contains this text."""
        return text in self.text

    @functools.cached_property
    def header(self) -> Definition:
        """The function without its body, with a form that changes only with what a caller must know."""
        assert isinstance(self.node, ast.FunctionDef)
        node = ast.FunctionDef(self.node.name, self.node.args, [], [], self.node.returns, lineno=self.node.lineno)
        return Definition(f"{self.where}'s header", self.file, node)

    def assignment_to(self, target: str) -> Definition | None:
        """The first statement in it that assigns to a target such as "self.hf_config", on its own."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign) and target in (ast.unparse(item) for item in node.targets):
                return Definition(f"{self.where}'s {target}", self.file, node)
        return None

    def need_assignment_to(self, target: str) -> Definition:
        found = self.assignment_to(target)
        if found is None:
            raise Drifted(f"no assignment to {target} in {self.where}")
        return found


def is_enabled_break(node: ast.expr) -> bool:
    """Tell whether an expression uses `eager_on_graph`: bare, or called with anything but False."""
    if isinstance(node, ast.Call):
        disabled = any(isinstance(a, ast.Constant) and a.value is False for a in (*node.args, *keyword_values(node)))
        return not disabled and ast.unparse(node.func).endswith("eager_on_graph")
    return ast.unparse(node).endswith("eager_on_graph")


def keyword_values(node: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in node.keywords]


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, those under if, try and with included, those of inner functions not."""
    for field in ("body", "orelse", "handlers", "finalbody"):
        for node in getattr(scope, field, ()):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from statements(node)


def bound_names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()
