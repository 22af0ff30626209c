# SPDX-License-Identifier: Apache-2.0
"""Wrappers: the same kind of object as the function, marked with the fix and what it calls."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_bcg_fixes.engine import call_counts, graph_break
from sglang_bcg_fixes.engine.slots import MISSING, PatchError, core
from sglang_bcg_fixes.model import How

MARK = "__bcg_fix__"
# what a wrapper of ours goes on to call
INNER = "__bcg_inner__"
# where SGLang makes the wrappers of its hooks
HOOK_REGISTRY = "/srt/plugins/hook_registry.py"
# how far a stranger's wrapper is searched for what it calls
FAR = 200
# functools.wraps gives our marks to whatever stands round ours, so they alone tell nothing
_made: weakref.WeakSet[Any] = weakref.WeakSet()


def layers(outermost: Any) -> Iterator[Any]:
    """A function and what it goes on to call, outermost first."""
    found, seen = [outermost], {id(outermost)}
    while found and len(seen) < FAR:
        value = found.pop(0)
        yield value
        new = [inner for inner in map(core, callees(value)) if callable(inner) and id(inner) not in seen]
        seen.update(map(id, new))
        found += new


def callees(value: Any) -> Iterable[Any]:
    """List what a function may call: ours record it, a foreign one calls only what it holds.

    `__wrapped__` alone proves nothing: SGLang's own hooks set it on functions that never call what they replaced.
    """
    kind = type(value)
    if is_ours(value):
        return [vars(value)[INNER]] if INNER in vars(value) else []
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
        return [*cells, *inherited(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is types.MethodType:
        return [value.__func__]
    if issubclass(kind, type):
        return []
    return [*getattr(value, "__dict__", {}).values(), getattr(value, "__wrapped__", None)]


def inherited(method: types.FunctionType) -> list[Any]:
    """The method that this one finds under its own name by `super()`, which closes over the class that defines it."""
    name, cells = method.__code__.co_name, dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    if "__class__" not in cells or is_empty(cells["__class__"]) or not {"super", name} <= {*method.__code__.co_names}:
        return []
    bases = cells["__class__"].cell_contents.__mro__[1:]
    return [vars(base)[name] for base in bases if name in vars(base)][:1]


def fixes_in(function: Any) -> set[str]:
    """The fixes that a call of this function comes to, whatever stands round them."""
    return {getattr(value, MARK) for value in layers(core(function)) if is_ours(value)}


def is_ours(value: Any) -> bool:
    return MARK in getattr(value, "__dict__", {}) and value in _made


def is_foreign(value: Any) -> bool:
    """Tell whether others put it there: neither a fix did, nor this package's own code for a while, as a self-check."""
    package = __name__.partition(".")[0]
    return not is_ours(value) and str(getattr(value, "__module__", "")).partition(".")[0] != package


def is_empty(cell: types.CellType) -> bool:
    """Tell whether a closure's variable has no value yet."""
    return cell == types.CellType()


def load_body(body: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(body, str):
        return body
    module, _, name = body.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def rebuild(where: str, raw: Any, how: How, body: Callable[..., Any], fix_id: str) -> Any:
    """The same kind of object as stands there, doing the new thing."""
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(rebuild(where, raw.__func__, how, body, fix_id))
    if isinstance(raw, property):
        return property(rebuild(where, raw.fget, how, body, fix_id), raw.fset, raw.fdel, raw.__doc__)
    if isinstance(raw, type):
        raise PatchError(f"{where} is a class; patch its methods, so that isinstance and super keep working")
    if hasattr(type(raw), "__getitem__"):
        raise PatchError(f"{where} is launched with a [grid]; patch the function that launches it")
    if not callable(raw):
        raise PatchError(f"{where} holds {describe(raw)}, which is not a function")
    if graph_break.is_product(raw) and how not in (How.GRAPH_BREAK, How.AROUND_BREAK):
        raise PatchError(f"{where} is a graph break, whose replay keeps the inner function; patch it as graph_break")
    if how is How.AROUND_BREAK and not any(map(graph_break.is_product, layers(raw))):
        raise PatchError(f"{where} is no graph break; patch it as around")
    if how is How.GRAPH_BREAK and not graph_break.is_product(raw) and any(map(graph_break.is_product, layers(raw))):
        # a break made of it would have the other one within, and end a segment that has ended
        raise PatchError(
            f"{where} holds {describe(raw)} around the graph break: its plugin has to register it as SGLang's "
            f"HookType.AROUND, which SGLang applies after every plugin"
        )
    inner = graph_break.inner_of(raw) if graph_break.is_product(raw) else raw
    refuse_other_parameters(where, inner, how, body)
    number = call_counts.TALLY.number(fix_id, where)
    make = graph_break.rebuild if how is How.GRAPH_BREAK else functools.partial(wrap, how=how)
    wrapper = make(raw, body=body, number=number)
    setattr(wrapper, MARK, fix_id)
    # a replacement goes on to call nothing that was there
    if how is not How.REPLACE:
        setattr(wrapper, INNER, raw)
    _made.add(wrapper)
    return wrapper


def wrap(
    original: Callable[..., Any], how: How, body: Callable[..., Any], number: int = call_counts.NO_PLACE
) -> Callable[..., Any]:
    counts, is_traced = call_counts.TALLY.counts, call_counts.tracing_check()

    def before(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            counts[number] += 1
        body(*args, **kwargs)
        return original(*args, **kwargs)

    def after(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            counts[number] += 1
        return body(original(*args, **kwargs), *args, **kwargs)

    def around(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            counts[number] += 1
        return body(original, *args, **kwargs)

    def replace(*args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            counts[number] += 1
        return body(*args, **kwargs)

    made = {How.BEFORE: before, How.AFTER: after, How.REPLACE: replace}
    wrapper = made.get(how, around)
    # `updated=()`: the markers that torch's compiler keeps in __dict__ are not ours to copy
    return functools.update_wrapper(wrapper, original, updated=())


def refuse_other_parameters(where: str, original: Any, how: How, body: Callable[..., Any]) -> None:
    """Raise unless the body names the original's first parameters in order, others by keyword only."""
    theirs, their_keywords = parameter_names(original)
    ours, our_keywords = parameter_names(body)
    # the first one is the original, or its result
    named = ours[1:] if how in (How.AROUND, How.AFTER, How.GRAPH_BREAK, How.AROUND_BREAK) else ours
    if named != theirs[: len(named)] or not set(our_keywords) <= set(their_keywords):
        name = getattr(body, "__qualname__", repr(body))
        raise PatchError(
            f"{where} takes ({', '.join([*theirs, '*', *their_keywords])}), but {name} expects "
            f"({', '.join([*named, '*', *our_keywords])})"
        )


def parameter_names(function: Any) -> tuple[list[str], list[str]]:
    """The parameters that can be given by position, and those that can be given by keyword only."""
    schema = getattr(getattr(function, "default", None), "_schema", None)
    if schema is not None:
        # an operation registered with torch has a schema in place of a signature
        arguments = schema.arguments
        return [a.name for a in arguments if not a.kwarg_only], [a.name for a in arguments if a.kwarg_only]
    parameters = inspect.signature(function).parameters.values()
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return by_position, [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def describe(value: Any) -> str:
    """Enough to find whose object this is."""
    if value is MISSING:
        return "nothing"
    value = core(value)
    owner = getattr(value, MARK) if is_ours(value) else None
    code = getattr(value, "__code__", None)
    if code and code.co_filename.endswith(HOOK_REGISTRY) and "hook" in code.co_freevars:
        # the same file for all hooks: what one calls tells whose it is
        code = getattr(value.__closure__[code.co_freevars.index("hook")].cell_contents, "__code__", code)
    place = f" from {code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{getattr(value, '__qualname__', type(value).__name__)}{place}" + (f", of fix {owner}" if owner else "")
