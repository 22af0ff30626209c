"""Patch points put into effect: all of a fix or none of it, written down, read back, and undone exactly."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_bcg_fixes import graph_break, reached
from sglang_bcg_fixes.model import Fix, How, Kernel, PatchPoint

MARK = "__bcg_fix__"
# what a wrapper of ours goes on to call
INNER = "__bcg_inner__"
MISSING = object()
# the kinds that have a function inside
WRAPPED = (staticmethod, classmethod, property)
# in the globals of every module, and most of all that these hold
BUILTINS = vars(builtins)
# how far a stranger's wrapper is searched for what it calls
FAR = 200
# functools.wraps gives our marks to whatever stands round ours, so they alone tell nothing
_made: weakref.WeakSet[Any] = weakref.WeakSet()


class PatchError(Exception):
    """A patch point that cannot be changed or restored, and why."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place that holds a function: an attribute of a module or class, or an item of a dictionary."""

    where: str
    owner: Any
    name: Any
    is_item: bool = False

    def own(self) -> Any:
        """What stands there itself, unbound and not inherited."""
        return (self.owner if self.is_item else vars(self.owner)).get(self.name, MISSING)

    def raw(self) -> Any:
        """What stands there or is inherited, without the binding that attribute access does."""
        if self.own() is MISSING and isinstance(self.owner, type):
            return next((vars(base)[self.name] for base in self.owner.__mro__ if self.name in vars(base)), MISSING)
        return self.own()

    def today(self) -> Any:
        """What SGLang finds there now: the class or the table may be another one than when it was patched."""
        module, _, path = self.where.partition(":")
        slot = slot_in(sys.modules.get(module, MISSING), self.where, path)
        return MISSING if slot is None else slot.raw()

    def put(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.owner, self.name)
        elif self.is_item:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclasses.dataclass(frozen=True)
class Change:
    """One slot that was changed. Originals live here: a module global of ours would be rebound like any other."""

    slot: Slot
    before: Any
    after: Any


class Ledger:
    """What has been changed in this process."""

    def __init__(self) -> None:
        self._changes: dict[str, list[Change]] = {}

    def applied(self) -> list[str]:
        return list(self._changes)

    def apply(self, fix: Fix | Kernel) -> None:
        """Change every patch point of the fix, or raise and leave everything as it was."""
        if fix.id in self._changes:
            raise PatchError(f"{fix.id} is applied already")
        done: list[Change] = []
        try:
            for point in fix.patches:
                change_point(fix.id, point, done)
            refuse_stale_holders(done)
            problems = self._differences(done)
            if problems:
                raise PatchError("; ".join(problems))
        except BaseException:
            put_back(done)
            raise
        self._changes[fix.id] = done

    def read_back(self, fix_id: str) -> list[str]:
        """What is no longer as it was applied; empty when all of it is live, by itself or inside what others added."""
        return self._differences(self._changes[fix_id])

    def wrapped(self, fix_id: str) -> list[str]:
        """Where somebody else's function stands round what was applied."""
        found = [(change.slot.where, change.slot.today()) for change in self._changes[fix_id] if is_live(change)]
        return [f"{where} is inside {describe(value)}" for where, value in found if not is_ours(core(value))]

    def undo(self, fix_id: str) -> None:
        """Restore every slot to the very object that stood there, or raise and leave everything as it is."""
        if fix_id not in self._changes:
            raise PatchError(f"{fix_id} is not applied")
        above = [change.slot for change in self._changes[fix_id] if change.slot.own() is not change.after]
        if above:
            problems = "; ".join(f"{slot.where} holds {describe(slot.own())}" for slot in above)
            raise PatchError(f"{fix_id} cannot be undone, undo what came later first: {problems}")
        put_back(self._changes.pop(fix_id))

    @staticmethod
    def _differences(changes: list[Change]) -> list[str]:
        held = ((change.slot.where, change.slot.today()) for change in changes if not is_live(change))
        return [f"{where} holds {describe(value)}" for where, value in held]


def is_live(change: Change) -> bool:
    """Whether the slot holds what was put there, itself or inside what later fixes or other plugins put round it."""
    return any(value is core(change.after) for value in layers(core(change.slot.today())))


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
    """What a function may call: ours say it, and a stranger's cannot call what it does not hold.

    `__wrapped__` alone is no proof: SGLang's own hooks set it on functions that never call what they replaced.
    """
    kind = type(value)
    if is_ours(value):
        return [vars(value)[INNER]] if INNER in vars(value) else []
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is types.MethodType:
        return [value.__func__]
    if issubclass(kind, type):
        return []
    return [*getattr(value, "__dict__", {}).values(), getattr(value, "__wrapped__", None)]


def fixes_in(function: Any) -> set[str]:
    """The fixes that a call of this function comes to, whatever stands round them."""
    return {getattr(value, MARK) for value in layers(core(function)) if is_ours(value)}


def is_ours(value: Any) -> bool:
    return MARK in getattr(value, "__dict__", {}) and value in _made


def change_point(fix_id: str, point: PatchPoint, done: list[Change]) -> None:
    slot = locate(point.where)
    before = slot.raw()
    body = load_body(point.body)
    after = rebuild(slot.where, before, point.how, body, fix_id)
    places = [slot]
    for where in point.aliases:
        alias = locate((where,))
        if alias.raw() is not before:
            raise PatchError(f"the declared alias {where} holds {describe(alias.raw())}, not {slot.where}")
        places.append(alias)
    for place in places:
        # written down first, so that a failure halfway is rolled back too
        done.append(Change(place, place.own(), after))
        place.put(after)
    if isinstance(slot.owner, types.ModuleType):
        rebind_copies(before, after, done)


def put_back(changes: list[Change]) -> None:
    in_modules: dict[int, Change] = {}
    while changes:
        change = changes.pop()
        if change.slot.own() is not change.before:
            change.slot.put(change.before)
        if isinstance(change.slot.owner, types.ModuleType) and change.before is not MISSING:
            in_modules.setdefault(id(change.after), change)
    # modules imported since then have taken copies of ours; one search for each object, latest first
    for change in in_modules.values():
        rebind_copies(change.after, change.before, [])


def rebind_copies(old: Any, new: Any, done: list[Change]) -> None:
    """Follow `from X import Y` into every module of SGLang."""
    for module in sglang_modules():
        for name, value in list(vars(module).items()):
            if value is old:
                slot = Slot(f"{module.__name__}:{name}", module, name)
                done.append(Change(slot, old, new))
                slot.put(new)


def refuse_stale_holders(changes: list[Change]) -> None:
    """Raise when a table, class, partial or closure of SGLang still holds a function that was replaced.

    For every fix, all that SGLang has imported is looked at anew: what it holds may have changed since the last one.
    """
    replaced = {id(core(change.before)): change for change in changes if change.before is not MISSING}
    for module in sglang_modules():
        for name, value in list(vars(module).items()):
            for item in held_by(value, module.__name__):
                function = core(item) if issubclass(type(item), WRAPPED) else item
                if id(function) in replaced:
                    raise PatchError(
                        f"{module.__name__}:{name}{path_to(item, value)} still holds the old "
                        f"{replaced[id(function)].slot.where}; declare it in `aliases`, or patch it itself"
                    )


def held_by(value: Any, module_name: str) -> Iterable[Any]:
    """What a module-level name holds one level down.

    Nothing of the value is asked for but what its type is known to have: SGLang keeps objects that import whole
    packages at the first attribute, and mappings that do at the first item.
    """
    kind = type(value)
    if issubclass(kind, type):
        return list(vars(value).values()) if vars(value).get("__module__") == module_name else ()
    if issubclass(kind, dict):
        # one of the modules is enough for what all of them have
        return list(dict.values(value)) if value is not BUILTINS or module_name == "sglang" else ()
    if issubclass(kind, list):
        return list.__iter__(value)
    if issubclass(kind, tuple):
        return tuple.__iter__(value)
    if kind is functools.partial:
        return (value.func,)
    function = graph_break.graph_call(value)
    # our own wrappers hold the original on purpose
    if type(function) is types.FunctionType and function.__closure__ and MARK not in vars(function):
        return [cell.cell_contents for cell in function.__closure__ if not is_empty(cell)]
    return ()


def path_to(item: Any, value: Any) -> str:
    """How to get to what `held_by` found in a value; the repr of a key is anybody's code, and asked for only here."""
    kind = type(value)
    if issubclass(kind, type):
        return next(f".{name}" for name, held in vars(value).items() if held is item)
    if issubclass(kind, dict):
        return next(f"[{key!r}]" for key, held in dict.items(value) if held is item)
    if issubclass(kind, list | tuple):
        items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        return next(f"[{index}]" for index, held in enumerate(items) if held is item)
    return ".func" if kind is functools.partial else "'s closure"


def is_empty(cell: types.CellType) -> bool:
    """Whether a closure's variable has not been given a value yet."""
    return cell == types.CellType()


def sglang_modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if (name == "sglang" or name.startswith("sglang.")) and issubclass(type(module), types.ModuleType)
    ]


def modules_of(fix: Fix | Kernel) -> list[str]:
    """Every module that the fix may change, in the order of its patch points."""
    places = [where for point in fix.patches for where in point.where]
    return list(dict.fromkeys(where.partition(":")[0] for where in places))


def locate(alternatives: tuple[str, ...]) -> Slot:
    """The first of the alternatives that exists."""
    missing = []
    for where in alternatives:
        module_name, _, path = where.partition(":")
        try:
            owner = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            missing.append(f"no module {error.name}")
            continue
        slot = slot_in(owner, where, path)
        if slot:
            return slot
        missing.append(f"no {where}")
    raise PatchError("; ".join(missing))


def slot_in(module: Any, where: str, path: str) -> Slot | None:
    """The place in a module; of an item only the table has to be there."""
    path, key = split_item(path)
    *scopes, name = path.split(".")
    owner = module
    for scope in scopes:
        owner = getattr(owner, scope, MISSING)
    slot = Slot(where, owner, name)
    if owner is MISSING or slot.raw() is MISSING:
        return None
    return slot if key is None else Slot(where, slot.raw(), key, is_item=True)


def split_item(path: str) -> tuple[str, Any]:
    """ "TABLE['key']" as ("TABLE", "key"); a plain path with None."""
    if not path.endswith("]"):
        return path, None
    name, _, key = path.removesuffix("]").partition("[")
    return name, ast.literal_eval(key)


def load_body(body: str) -> Callable[..., Any]:
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
    if graph_break.is_product(raw) and how is not How.GRAPH_BREAK:
        raise PatchError(f"{where} is a graph break, whose replay keeps the inner function; patch it as graph_break")
    inner = graph_break.inner_of(raw) if graph_break.is_product(raw) else raw
    refuse_other_parameters(where, inner, how, body)
    number = reached.TALLY.number(fix_id, where)
    make = graph_break.rebuild if how is How.GRAPH_BREAK else functools.partial(wrap, how=how)
    wrapper = make(raw, body=body, number=number)
    setattr(wrapper, MARK, fix_id)
    # a replacement goes on to call nothing that was there
    if how is not How.REPLACE:
        setattr(wrapper, INNER, raw)
    _made.add(wrapper)
    return wrapper


def wrap(
    original: Callable[..., Any], how: How, body: Callable[..., Any], number: int = reached.NO_PLACE
) -> Callable[..., Any]:
    counts, is_traced = reached.TALLY.counts, reached.tracing_check()

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

    wrapper = {How.BEFORE: before, How.AFTER: after, How.AROUND: around, How.REPLACE: replace}[how]
    # `updated=()`: the markers that torch's compiler keeps in __dict__ are not ours to copy
    return functools.update_wrapper(wrapper, original, updated=())


def refuse_other_parameters(where: str, original: Any, how: How, body: Callable[..., Any]) -> None:
    """Raise unless the body names the original's first parameters in their order, and others by keyword in both."""
    theirs, their_keywords = parameter_names(original)
    ours, our_keywords = parameter_names(body)
    # the first one is the original, or its result
    named = ours[1:] if how in (How.AROUND, How.AFTER, How.GRAPH_BREAK) else ours
    if named != theirs[: len(named)] or not set(our_keywords) <= set(their_keywords):
        raise PatchError(
            f"{where} takes ({', '.join([*theirs, '*', *their_keywords])}), but {body.__qualname__} expects "
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


def core(value: Any) -> Any:
    """The function inside a staticmethod, classmethod or property; other values as they are."""
    # not isinstance, which asks what is no instance for its __class__: a proxy imports what it stands for then
    kind = type(value)
    if issubclass(kind, staticmethod | classmethod):
        return value.__func__
    return value.fget if issubclass(kind, property) else value


def describe(value: Any) -> str:
    """Enough to find whose object this is."""
    if value is MISSING:
        return "nothing"
    value = core(value)
    owner = getattr(value, MARK) if is_ours(value) else None
    code = getattr(value, "__code__", None)
    place = f" from {code.co_filename}:{code.co_firstlineno}" if code else ""
    return f"{getattr(value, '__qualname__', type(value).__name__)}{place}" + (f", of fix {owner}" if owner else "")
