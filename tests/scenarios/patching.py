# SPDX-License-Identifier: Apache-2.0
"""Definitions of every kind in the fake SGLang, changed and restored in many orders; each asserts by itself."""

from __future__ import annotations

import builtins
import concurrent.futures
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from sglang.srt import target

from sglang_bcg_fixes.engine import graph_break, wrappers
from sglang_bcg_fixes.engine import ledger as ledger_module
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.engine.slots import PatchError
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.engine.wrappers import fixes_in
from sglang_bcg_fixes.model import How, PatchPoint
from tests.engine import bodies
from tests.engine.bodies import fix, point
from tests.scenarios import named

BREAKS = "sglang.srt.breaks"
# what a call of each kind of slot gives in the end
CALLS: dict[str, Callable[[], Any]] = {
    "function": lambda: target.function(7),
    "Thing.method": lambda: target.Thing().method(7),
    "Thing.made": lambda: target.Thing.made(7),
    "Thing.static": lambda: target.Thing.static(7),
    "Thing.size": lambda: target.Thing().size,
    "Thing.inherited": lambda: target.Thing().inherited(7),
    "Thing.inherited_class": lambda: target.Thing.inherited_class(7),
    "Thing.inherited_static": lambda: target.Thing.inherited_static(7),
}
ledger = Ledger()


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except PatchError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError("not refused")


def every_kind(path: str, how: str) -> None:
    call, plain = CALLS[path], CALLS[path]()
    expected = {"around": ["around", *plain], "after": [*plain, "after"], "replace": ["replaced"], "before": plain}[how]
    slot: Any = vars(target.Thing if "." in path else target)
    name = path.rpartition(".")[2]
    original, base = slot.get(name, "inherited"), dict(vars(target.Base))
    body = "seen_before" if how == "before" else how
    for _ in range(3):
        ledger.apply(fix("one", point(path, How(how), body)))
        assert call() == expected, call()
        assert ledger.read_back("one") == []
        assert type(slot[name]) is type(original) or original == "inherited"
        ledger.undo("one")
        assert slot.get(name, "inherited") is original
        assert call() == plain
    assert dict(vars(target.Base)) == base
    assert len(bodies.seen) == (how == "before") * 3, bodies.seen


def two_fixes(path: str) -> None:
    call, plain = CALLS[path], CALLS[path]()
    ledger.apply(fix("one", point(path)))
    ledger.apply(fix("two", point(path, body="outer")))
    both = call()
    assert both == ["outer", "around", *plain], both
    assert ledger.read_back("one") == [] == ledger.read_back("two")
    refused(lambda: ledger.undo("one"), "one cannot be undone", "of fix two")
    assert call() == both and ledger.applied() == ["one", "two"]
    ledger.undo("two")
    assert call() == ["around", *plain]
    ledger.undo("one")
    assert call() == plain
    refused(lambda: ledger.undo("one"), "one is not applied")


def replaced_by_another() -> None:
    ledger.apply(fix("one", point("function")))
    ledger.apply(fix("two", point("function", How.REPLACE, "replace")))
    [problem] = ledger.read_back("one")
    assert "of fix two" in problem and ledger.read_back("two") == []


def found_in_holders() -> None:
    assert fixes_in(target.function) == set() == fixes_in(None)
    ledger.apply(fix("one", point("function")))
    ledger.apply(fix("two", point("function", body="outer")))
    ours = target.function
    for held in (ours, functools.partial(ours), lambda x, original=ours: original(x)):
        assert fixes_in(held) == {"one", "two"}, held
    # it takes our marks along and never calls us
    assert fixes_in(functools.wraps(ours)(lambda x: [])) == set()


def second_apply() -> None:
    ledger.apply(fix("one", point("function")))
    once = target.function
    refused(lambda: ledger.apply(fix("one", point("function"))), "one is applied already")
    assert target.function is once
    ledger.undo("one")
    ledger.apply(fix("one", point("function")))
    assert target.function(1) == ["around", "function", 1, 1]


def failure_in_the_middle() -> None:
    from sglang.srt import copies

    originals = (target.function, copies.function, copies.renamed, vars(target.Thing)["made"])
    broken = fix("one", point("function"), point("Thing.made"), point("Thing.inherited"), point("Thing.nothing"))
    refused(lambda: ledger.apply(broken), "no sglang.srt.target:Thing.nothing")
    assert originals == (target.function, copies.function, copies.renamed, vars(target.Thing)["made"])
    assert "inherited" not in vars(target.Thing) and ledger.applied() == []


def copies_follow() -> None:
    elsewhere: Any = types.ModuleType("elsewhere")
    elsewhere.function = original = target.function
    sys.modules["elsewhere"] = elsewhere
    from sglang.srt import copies

    plain = copies.use(5)
    ledger.apply(fix("one", point("function")))
    assert copies.use(5) == [["around", *part] for part in plain]
    assert elsewhere.function is original
    from sglang.srt import late_copies

    assert late_copies.use(5) == copies.use(5)
    ledger.undo("one")
    assert copies.use(5) == plain
    assert late_copies.use(5) == plain, "a copy taken while the fix was on must come off with it"
    assert copies.renamed is late_copies.function is original


def undeclared_holder(module: str, path: str, place: str) -> None:
    importlib.import_module(f"sglang.srt.{module}")
    original = target.function, vars(target.Thing)["method"]
    refused(lambda: ledger.apply(fix("one", point(path))), place, "aliases")
    assert original == (target.function, vars(target.Thing)["method"])


def holder_between_two_fixes() -> None:
    original = target.function
    ledger.apply(fix("one", point("Thing.method")))
    target.LATER = {"entry": original}
    refused(lambda: ledger.apply(fix("two", point("function"))), "sglang.srt.target:LATER['entry']", "aliases")
    assert target.function is original and ledger.applied() == ["one"] and ledger.read_back("one") == []
    target.LATER.clear()
    ledger.apply(fix("two", point("function")))


def holder_of_an_earlier_fix() -> None:
    from sglang.srt import tables

    alias = "sglang.srt.tables:BY_NAME['function']"
    ledger.apply(fix("one", point("function", aliases=(alias,))))
    ones = target.function
    refused(lambda: ledger.apply(fix("two", point("function", body="outer"))), alias, "still holds")
    assert target.function is tables.BY_NAME["function"] is ones and ledger.applied() == ["one"]
    ledger.apply(fix("two", point("function", body="outer", aliases=(alias,))))
    assert tables.BY_NAME["function"](1) == ["outer", "around", "function", 1, 1]


def checked_together() -> None:
    from sglang.srt import tables

    original, searches = target.function, []
    search = vars(ledger_module)["refuse_stale_holders"]

    def counted(changes: Any) -> Any:
        searches.append(len(changes))
        return search(changes)

    vars(ledger_module)["refuse_stale_holders"] = counted
    ledger.change(fix("one", point("Thing.made")))
    ledger.change(fix("two", point("Thing.static")))
    assert ledger.check() == {} == ledger.check() and searches == [2, 0]
    ledger.change(fix("three", point("function")))
    ledger.change(fix("four", point("Thing.method")))
    ledger.change(fix("five", point("function", body="outer")))
    failed = ledger.check()
    assert list(failed) == ["three", "five"], failed
    assert all("sglang.srt.tables:BY_NAME['function'] still holds" in str(error) for error in failed.values())
    assert target.function is original is tables.BY_NAME["function"]
    assert ledger.applied() == ["one", "two", "four"]
    assert target.Thing().method(1)[0] == "around" and ledger.read_back("four") == [] == ledger.read_back("one")


def holder_replaced_by_a_later_fix() -> None:
    from sglang.srt import tables

    original = target.function
    entry = PatchPoint(("sglang.srt.tables:BY_NAME['function']",), How.AROUND, "tests.engine.bodies:outer")
    ledger.change(fix("one", point("function")))
    ledger.change(fix("two", entry))
    failed = ledger.check()
    assert list(failed) == ["one"] and "BY_NAME['function'] still holds" in str(failed["one"]), failed
    assert target.function is original and ledger.applied() == ["two"]
    assert tables.BY_NAME["function"](1) == ["outer", "function", 1, 1]
    ledger.undo("two")
    assert tables.BY_NAME["function"] is original


def imported_by_the_fix() -> None:
    original = target.function
    ledger.apply(fix("one", point("Thing.method")))
    importing = point("keep", module="sglang.srt.closures")
    refused(lambda: ledger.apply(fix("two", importing, point("function"))), "sglang.srt.closures:kept's closure")
    assert target.function is original
    del sys.modules["sglang.srt.closures"]
    ledger.apply(fix("two", point("function"), importing))
    from sglang.srt import closures

    assert closures.kept(1) == ["around", "function", 1, 1], "imported by the fix, behind its first change"
    later = fix("three", point("function", body="outer"))
    refused(lambda: ledger.apply(later), "sglang.srt.closures:kept's closure still holds")


def held_by_builtins() -> None:
    vars(builtins)["everywhere"] = target.function
    refused(lambda: ledger.apply(fix("one", point("function"))), "sglang:__builtins__['everywhere'] still holds")


def strange_objects() -> None:
    from sglang.srt import lazy

    sys.modules["elsewhere"] = lazy.proxy
    ledger.apply(fix("one", point("function")))
    assert target.function(1)[0] == "around"


def declared_alias(path: str, alias: str) -> None:
    from sglang.srt import class_alias, tables

    def call() -> Any:
        if path == "function":
            return tables.BY_NAME["function"](5)
        return class_alias.Other.borrowed(target.Thing(), 5)

    plain = call()
    points = [point(path, aliases=(alias,))]
    if path != "function":
        tables.BY_NAME.clear()
    ledger.apply(fix("one", *points))
    assert call() == ["around", *plain]
    ledger.undo("one")
    assert call() == plain
    refused(lambda: ledger.apply(fix("two", point("Thing.made", aliases=(alias,)))), "declared alias")


def not_patchable(module: str, path: str, body: str, words: str) -> None:
    before = dict(vars(target)), dict(vars(target.Thing))
    refused(lambda: ledger.apply(fix("one", point(path, body=body, module=module))), words)
    assert before == (dict(vars(target)), dict(vars(target.Thing)))


def first_alternative() -> None:
    where = ("sglang.gone:function", "sglang.srt.target:gone", "sglang.srt.target:function")
    ledger.apply(fix("one", PatchPoint(where, How.AROUND, "tests.engine.bodies:named")))
    assert target.function(1) == ["named", "function", 1, 1]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of SGLang that imports what nobody has installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "sglang.srt.broken" else None

    def exec_module(self, module: types.ModuleType) -> None:
        importlib.import_module("a_package_that_is_not_installed")


def import_that_fails() -> None:
    broken = fix("one", point("x", module="sglang.srt.broken"))
    sys.meta_path.append(Finder())
    try:
        ledger.apply(broken)
    except ModuleNotFoundError as error:
        assert error.name == "a_package_that_is_not_installed"
    else:
        raise AssertionError("swallowed")


def break_decorated_again() -> None:
    from sglang.srt import breaks

    graphs, original = breaks.graphs, breaks.broken_operation
    refused(lambda: ledger.apply(fix("one", point("broken_operation", module=BREAKS))), "is a graph break")
    ledger.apply(fix("one", point("broken_operation", How.GRAPH_BREAK, "break_body", module=BREAKS)))
    assert type(breaks.broken_operation) is type(original) and breaks.broken_operation is not original
    out: list[Any] = []
    graphs.capturing = True
    breaks.broken_operation(5, out)
    captured = [5, "patched"] if graphs.FORM == "enable" else []
    assert out == captured, out
    assert breaks.log == ([["operation", 5]] if graphs.FORM == "enable" else [["stub", 5]])
    graphs.capturing = False
    [replay] = graphs.breaks
    out.clear()
    replay()
    assert out == [5, "patched"], "replay must run the patched body"
    if graphs.FORM == "object":
        out.clear()
        breaks.broken_operation.run_eager(5, out)
        assert out == [5, "patched"]
    ledger.undo("one")
    assert breaks.broken_operation is original


def break_gone_round() -> None:
    from sglang.srt import breaks

    graphs, original = breaks.graphs, breaks.broken_operation
    outside = fix("one", point("broken_operation", How.AROUND_BREAK, "instead_of_break", module=BREAKS))
    refused(
        lambda: ledger.apply(fix("two", point("forgotten", How.AROUND_BREAK, "instead_of_break", module=BREAKS))),
        "is no graph break; patch it as around",
    )
    ledger.apply(outside)
    assert ledger.read_back("one") == []
    out: list[Any] = []
    graphs.capturing = True
    breaks.broken_operation(4, out)
    assert out == ["captured"] and graphs.breaks == []
    breaks.broken_operation(5, out)
    [replay] = graphs.breaks
    out.clear()
    replay()
    assert out == [5], "a replay runs what the break runs, and nothing of what stood outside"
    # a break it still is, for whoever looks for one
    assert any(map(graph_break.is_product, wrappers.layers(breaks.broken_operation)))
    ledger.undo("one")
    assert breaks.broken_operation is original


def two_fixes_of_a_break(name: str) -> None:
    importlib.import_module(BREAKS)
    places = point(name, How.GRAPH_BREAK, "break_body", module=BREAKS)
    ledger.apply(fix("one", places))
    ledger.apply(fix("two", places))
    assert ledger.read_back("one") == [] == ledger.read_back("two")
    assert ledger.wrapped("one") == [] == ledger.wrapped("two")
    ledger.undo("two")
    assert ledger.read_back("one") == []


def stands_inside_what_this_package_put_there() -> None:
    ledger.apply(fix("one", point("function")))
    inner = target.function

    def count(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    with replaced(target, "function", count):
        assert ledger.read_back("one") == []
        assert [where for where in ledger.wrapped("one") if where.startswith("sglang.srt.target:function is inside ")]
    count.__module__ = "sglang_bcg_fixes.process.selfcheck.check"
    with replaced(target, "function", count):
        assert ledger.read_back("one") == [] == ledger.wrapped("one")


def break_of_a_method() -> None:
    from sglang.srt import breaks

    original, layer = vars(breaks.Layer)["run"], breaks.Layer()
    out: list[Any] = []
    ledger.apply(fix("one", point("Layer.run", How.GRAPH_BREAK, "method_break_body", module=BREAKS)))
    layer.run(1, out)
    layer.run.run_eager(2, out)
    breaks.graphs.capturing = True
    layer.run(3, out)
    breaks.graphs.breaks[0]()
    assert out == [1, "patched", 2, "patched", 3, "patched", 3, "patched"], out
    ledger.undo("one")
    assert vars(breaks.Layer)["run"] is original


def forgotten_break() -> None:
    from sglang.srt import breaks
    from sglang.srt.model_executor.breakable_cuda_graph import context

    original, graphs = breaks.forgotten, breaks.graphs
    ledger.apply(fix("one", point("forgotten", How.GRAPH_BREAK, "break_body", module=BREAKS)))
    out: list[Any] = []
    graphs.capturing = True
    breaks.forgotten(5, out)
    assert out == [5] and graphs.breaks == [], "other capture modes are left as they were"
    context.active = True
    breaks.forgotten(6, out)
    assert out == [5, 6, "patched"] and len(graphs.breaks) == 1
    graphs.breaks[0]()
    assert out == [5, 6, "patched", 6, "patched"]
    ledger.undo("one")
    assert breaks.forgotten is original


def break_inside_another_plugin() -> None:
    from sglang.srt import breaks

    theirs = breaks.broken_operation = functools.partial(breaks.broken_operation)
    ours = fix("one", point("broken_operation", How.GRAPH_BREAK, "break_body", module=BREAKS))
    refused(lambda: ledger.apply(ours), "sglang.srt.breaks:broken_operation holds partial around the graph break")
    assert breaks.broken_operation is theirs


def function_that_a_break_holds() -> None:
    from sglang.srt import breaks

    original = breaks.operation
    patched = fix("one", point("operation", body="around", module=BREAKS))
    refused(lambda: ledger.apply(patched), "sglang.srt.breaks:broken_operation's closure still holds")
    assert breaks.operation is original


def theirs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return ["theirs", *original(*args, **kwargs)]


def another_plugin(source: str, path: str, first: str) -> None:
    spec = importlib.util.spec_from_file_location("hook_registry", source)
    assert spec and spec.loader
    hooks = importlib.util.module_from_spec(spec)
    sys.modules["hook_registry"] = hooks
    spec.loader.exec_module(hooks)
    call, plain = CALLS[path], CALLS[path]()

    def hook() -> None:
        hooks.HookRegistry.register(f"sglang.srt.target.{path}", theirs, hooks.HookType.AROUND)
        hooks.HookRegistry.apply_hooks()

    ours = fix("one", point(path))
    if first == "theirs":
        hook()
        hooked = target.function, vars(target.Thing)["method"]
        ledger.apply(ours)
        assert call() == ["around", "theirs", *plain]
        ledger.undo("one")
        assert call() == ["theirs", *plain]
        assert hooked == (target.function, vars(target.Thing)["method"])
    else:
        ledger.apply(ours)
        hook()
        assert call() == ["theirs", "around", *plain]
        assert ledger.read_back("one") == []
        [place] = ledger.wrapped("one")
        assert f"sglang.srt.target:{path}" in place and f"from {__file__}:" in place, place
        assert "of fix" not in place, "its marks are copies of ours"
        refused(lambda: ledger.undo("one"), f"from {__file__}:")
        assert call() == ["theirs", "around", *plain]


def forked_child() -> None:
    ledger.apply(fix("one", point("function")))
    child = os.fork()
    if not child:
        right = target.function(1) == ["around", "function", 1, 1]
        ledger.undo("one")
        os._exit(0 if right and target.function(1) == ["function", 1, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert target.function(1) == ["around", "function", 1, 1] and ledger.read_back("one") == []


def spawned_child() -> None:
    ledger.apply(fix("one", point("function")))
    assert bodies.call_target(1) == ["around", "function", 1, 1]
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(bodies.call_target, 1).result() == ["function", 1, 1]
    assert bodies.call_target(1) == ["around", "function", 1, 1]


if __name__ == "__main__":
    named.run(globals())
