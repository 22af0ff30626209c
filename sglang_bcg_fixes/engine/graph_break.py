# SPDX-License-Identifier: Apache-2.0
"""The patch kind for graph breaks: functions that the installed SGLang runs eagerly between captured segments.

A break made by `eager_on_graph` hands the inner function to its replay, so hooking the break from outside changes
capture and leaves replay as it was. Here the inner function is taken out, changed, and put back under the installed
release's own decorator; a function that should be a break and is not gets that decorator for the first time.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_bcg_fixes.engine import call_counts

PACKAGES = (
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph",
    "sglang.srt.model_executor.breakable_cuda_graph",
)
DECORATOR_MODULES = tuple(f"{package}.breakable_cuda_graph" for package in PACKAGES)
CONTEXT_MODULES = tuple(f"{package}.context" for package in PACKAGES)


class NoBreaksHere(Exception):
    """The installed SGLang has no breakable graphs where any release we know has them."""


def is_product(value: Any) -> bool:
    """Tell whether this object was made by any release's `eager_on_graph`."""
    code = getattr(graph_call(value), "__code__", None)
    return code is not None and code.co_name == "wrapper" and code.co_filename.endswith("breakable_cuda_graph.py")


def inner_of(product: Any) -> Callable[..., Any]:
    """The function that a break runs, at capture and at every replay."""
    inner: Callable[..., Any] = closure_of(product)["inner"]
    return inner


def graph_call(value: Any) -> Any:
    """The function inside the callable object that newer releases return; other values as they are."""
    return vars(value).get("_graph_call", value) if type(value).__name__ == "_EagerOnGraphCallable" else value


def closure_of(product: Any) -> dict[str, Any]:
    function = graph_call(product)
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


def rebuild(original: Any, body: Callable[..., Any], number: int = call_counts.NO_PLACE) -> Any:
    """A break that runs `body(original, ...)`, whether or not the original is one."""
    if is_product(original):
        closure = closure_of(original)
        return decorate(around(closure["inner"], body, number), closure.get("capture_stub"))
    is_in_breakable_cuda_graph = load("context").is_in_breakable_cuda_graph
    broken = decorate(around(original, body, number), None)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # compiled and eager prefill keep the original: torch's compiler cannot trace a break
        if is_in_breakable_cuda_graph():
            return broken(*args, **kwargs)
        return original(*args, **kwargs)

    return functools.update_wrapper(dispatch, original, updated=())


def around(original: Callable[..., Any], body: Callable[..., Any], number: int) -> Callable[..., Any]:
    counts, is_traced = call_counts.TALLY.counts, call_counts.tracing_check()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            counts[number] += 1
        return body(original, *args, **kwargs)

    return functools.update_wrapper(run, original, updated=())


def decorate(inner: Callable[..., Any], capture_stub: Callable[..., Any] | None) -> Any:
    """Apply the installed release's own decorator, with its arguments in that release's form."""
    eager_on_graph = load("breakable_cuda_graph").eager_on_graph
    arguments = {} if capture_stub is None else {"capture_stub": capture_stub}
    if "fn" in inspect.signature(eager_on_graph).parameters:
        return eager_on_graph(**arguments)(inner)
    return eager_on_graph(True, **arguments)(inner)


# asked by layers and in every step: where the first package is missing, to look for it takes longer than they do
@functools.cache
def load(name: str) -> ModuleType:
    """A module of the breakable-graph package, wherever this release keeps it."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"{package}.{name}.".startswith(f"{error.name}."):
                raise
    raise NoBreaksHere(f"no module {name} in {' or '.join(PACKAGES)}")
