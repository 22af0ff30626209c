# SPDX-License-Identifier: Apache-2.0
"""Programs of the tests, read before they run: how each one has SGLang imported."""

from __future__ import annotations

import ast
import functools
import pathlib
import tokenize
from collections.abc import Iterator, Sequence

REPOSITORY = pathlib.Path(__file__).parent.parent


def with_graphs(arguments: Sequence[str]) -> bool | None:
    """The program's `import_sglang(with_graphs=...)`, or that of modules that it imports; None if not just one way."""
    kind, what, *_ = arguments
    program = what if kind == "-c" else source(what)
    ways = set(ways_of(program)) or {way for name in modules(program) for way in ways_of(source(name))}
    return ways.pop() if len(ways) == 1 else None


@functools.cache
def source(name: str) -> str:
    """The text of a module of this repository that may run beside SGLang, and nothing for any other name."""
    file = REPOSITORY.joinpath(*name.split(".")).with_suffix(".py")
    if not name.startswith(("cpu_sglang.", "tests.")) or not file.is_file():
        return ""
    # as Python reads code: comments are of no account here, and tests/traced.py tells by this
    with tokenize.open(file) as text:
        return text.read()


def modules(program: str) -> Iterator[str]:
    """Names that it imports from tests; some of them are not modules."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tests."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tests":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def ways_of(program: str) -> frozenset[bool]:
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    imports = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "import_sglang"]
    return frozenset(way for call in imports for way in ways_of_call(call))


def ways_of_call(call: ast.Call) -> set[bool]:
    """Both ways where the program decides when it runs."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "with_graphs"), ast.Constant(False))
    return {bool(given.value)} if isinstance(given, ast.Constant) else {True, False}
