"""Every kind of definition, changed and restored in many orders; each case in a process of its own."""

from __future__ import annotations

import pytest

from tests import processes
from tests.wheels import NEWEST

PRELUDE = """
import sys
from sglang.srt import target
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.engine.slots import PatchError
from tests.engine import bodies
from tests.engine.bodies import fix, point

ledger = Ledger()

def refused(call, *words):
    try:
        call()
    except PatchError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
    else:
        raise AssertionError("not refused")
"""


def check(code: str, form: str = "enable") -> None:
    """Run the code beside the fake SGLang; its assertions are the test's."""
    done = processes.python(
        "-c", PRELUDE + processes.code(code), paths=[processes.FAKE_SGLANG], environment={"FAKE_FORM": form}
    )
    assert done.returncode == 0, done.stderr


# a call, what it gives in the end unpatched, and where its slot is
KINDS = {
    "function": "target.function(7)",
    "Thing.method": "target.Thing().method(7)",
    "Thing.made": "target.Thing.made(7)",
    "Thing.static": "target.Thing.static(7)",
    "Thing.size": "target.Thing().size",
    "Thing.inherited": "target.Thing().inherited(7)",
    "Thing.inherited_class": "target.Thing.inherited_class(7)",
    "Thing.inherited_static": "target.Thing.inherited_static(7)",
}
HOWS = {
    "around": "['around', *plain]",
    "after": "[*plain, 'after']",
    "replace": "['replaced']",
    "before": "plain",
}


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_every_kind_is_changed_and_restored(path: str, how: str) -> None:
    body = "seen_before" if how == "before" else how
    check(f"""
        slot = vars(target.Thing if {"." in path!r} else target)
        name = {path.rpartition(".")[2]!r}
        plain, original = {KINDS[path]}, slot.get(name, "inherited")
        base = dict(vars(target.Base))
        for round in range(3):
            ledger.apply(fix("one", point({path!r}, How({how!r}), {body!r})))
            assert {KINDS[path]} == {HOWS[how]}, {KINDS[path]}
            assert ledger.read_back("one") == []
            assert type(slot[name]) is type(original) or original == "inherited"
            ledger.undo("one")
            assert slot.get(name, "inherited") is original
            assert {KINDS[path]} == plain
        assert dict(vars(target.Base)) == base
        assert len(bodies.seen) == ({how!r} == "before") * 3, bodies.seen
    """)


@pytest.mark.parametrize("path", KINDS)
def test_two_fixes_on_one_target_come_off_in_reverse_only(path: str) -> None:
    check(f"""
        plain = {KINDS[path]}
        ledger.apply(fix("one", point({path!r})))
        ledger.apply(fix("two", point({path!r}, body="outer")))
        both = {KINDS[path]}
        assert both == ["outer", "around", *plain], both
        assert ledger.read_back("one") == [] == ledger.read_back("two")
        refused(lambda: ledger.undo("one"), "one cannot be undone", "of fix two")
        assert {KINDS[path]} == both and ledger.applied() == ["one", "two"]
        ledger.undo("two")
        assert {KINDS[path]} == ["around", *plain]
        ledger.undo("one")
        assert {KINDS[path]} == plain
        refused(lambda: ledger.undo("one"), "one is not applied")
    """)


def test_a_fix_that_another_one_has_replaced_is_not_live() -> None:
    check("""
        ledger.apply(fix("one", point("function")))
        ledger.apply(fix("two", point("function", How.REPLACE, "replace")))
        [problem] = ledger.read_back("one")
        assert "of fix two" in problem and ledger.read_back("two") == []
    """)


def test_a_fix_is_found_in_what_holds_it_and_not_by_its_mark() -> None:
    check("""
        import functools
        from sglang_bcg_fixes.engine.wrappers import fixes_in
        assert fixes_in(target.function) == set() == fixes_in(None)
        ledger.apply(fix("one", point("function")))
        ledger.apply(fix("two", point("function", body="outer")))
        ours = target.function
        for held in (ours, functools.partial(ours), lambda x, original=ours: original(x)):
            assert fixes_in(held) == {"one", "two"}, held
        # it takes our marks along and never calls us
        assert fixes_in(functools.wraps(ours)(lambda x: [])) == set()
    """)


def test_a_second_apply_is_refused_and_changes_nothing() -> None:
    check("""
        ledger.apply(fix("one", point("function")))
        once = target.function
        refused(lambda: ledger.apply(fix("one", point("function"))), "one is applied already")
        assert target.function is once
        ledger.undo("one")
        ledger.apply(fix("one", point("function")))
        assert target.function(1) == ["around", "function", 1, 1]
    """)


def test_a_failure_in_the_middle_rolls_everything_back() -> None:
    check("""
        from sglang.srt import copies
        originals = (target.function, copies.function, copies.renamed, vars(target.Thing)["made"])
        broken = fix("one", point("function"), point("Thing.made"), point("Thing.inherited"), point("Thing.nothing"))
        refused(lambda: ledger.apply(broken), "no sglang.srt.target:Thing.nothing")
        assert originals == (target.function, copies.function, copies.renamed, vars(target.Thing)["made"])
        assert "inherited" not in vars(target.Thing) and ledger.applied() == []
    """)


def test_copies_follow_within_sglang_only() -> None:
    check("""
        import types
        elsewhere = types.ModuleType("elsewhere")
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
    """)


@pytest.mark.parametrize(
    ("module", "path", "place"),
    [
        ("tables", "function", "sglang.srt.tables:BY_NAME['function']"),
        ("partials", "function", "sglang.srt.partials:bound.func"),
        ("closures", "function", "sglang.srt.closures:kept's closure"),
        ("class_alias", "Thing.method", "sglang.srt.class_alias:Other.borrowed"),
        ("lists", "function", "sglang.srt.lists:IN_ORDER[1]"),
    ],
)
def test_an_undeclared_holder_of_the_old_function_is_an_error(module: str, path: str, place: str) -> None:
    check(f"""
        import sglang.srt.{module}
        original = target.function, vars(target.Thing)["method"]
        refused(lambda: ledger.apply(fix("one", point({path!r}))), {place!r}, "aliases")
        assert original == (target.function, vars(target.Thing)["method"])
    """)


def test_a_holder_that_appears_between_two_fixes_is_found() -> None:
    check("""
        original = target.function
        ledger.apply(fix("one", point("Thing.method")))
        target.LATER = {"entry": original}
        refused(lambda: ledger.apply(fix("two", point("function"))), "sglang.srt.target:LATER['entry']", "aliases")
        assert target.function is original and ledger.applied() == ["one"] and ledger.read_back("one") == []
        target.LATER.clear()
        ledger.apply(fix("two", point("function")))
    """)


def test_a_holder_of_what_an_earlier_fix_has_put_there_is_found() -> None:
    check("""
        from sglang.srt import tables
        alias = "sglang.srt.tables:BY_NAME['function']"
        ledger.apply(fix("one", point("function", aliases=(alias,))))
        ones = target.function
        refused(lambda: ledger.apply(fix("two", point("function", body="outer"))), alias, "still holds")
        assert target.function is tables.BY_NAME["function"] is ones and ledger.applied() == ["one"]
        ledger.apply(fix("two", point("function", body="outer", aliases=(alias,))))
        assert tables.BY_NAME["function"](1) == ["outer", "around", "function", 1, 1]
    """)


def test_what_a_fix_imports_itself_is_looked_at_too() -> None:
    check("""
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
    """)


def test_a_function_among_the_builtins_is_found() -> None:
    check("""
        import builtins
        builtins.everywhere = target.function
        refused(lambda: ledger.apply(fix("one", point("function"))), "sglang:__builtins__['everywhere'] still holds")
    """)


def test_looking_for_holders_asks_nothing_of_strange_objects() -> None:
    check("""
        from sglang.srt import lazy
        sys.modules["elsewhere"] = lazy.proxy
        ledger.apply(fix("one", point("function")))
        assert target.function(1)[0] == "around"
    """)


@pytest.mark.parametrize(
    ("path", "alias", "call"),
    [
        ("function", "sglang.srt.tables:BY_NAME['function']", "tables.BY_NAME['function'](5)"),
        ("Thing.method", "sglang.srt.class_alias:Other.borrowed", "class_alias.Other.borrowed(target.Thing(), 5)"),
    ],
)
def test_declared_aliases_are_changed_and_restored(path: str, alias: str, call: str) -> None:
    check(f"""
        from sglang.srt import class_alias, tables
        plain = {call}
        points = [point({path!r}, aliases=({alias!r},))]
        if {path!r} != "function":
            tables.BY_NAME.clear()
        ledger.apply(fix("one", *points))
        assert {call} == ["around", *plain]
        ledger.undo("one")
        assert {call} == plain
        refused(lambda: ledger.apply(fix("two", point("Thing.made", aliases=({alias!r},)))), "declared alias")
    """)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ('point("Thing")', "is a class; patch its methods"),
        ('point("kernel")', "patch the function that launches it"),
        ('point("Thing.width")', "not a function"),
        ('point("function", body="misnamed")', "takes (x, y, *), but misnamed expects (x, z, *)"),
        ('point("missing")', "no sglang.srt.target:missing"),
        ('point("x", module="sglang.srt.gone")', "no module sglang.srt.gone"),
    ],
)
def test_what_cannot_be_patched_is_refused_by_name(points: str, words: str) -> None:
    check(f"""
        before = dict(vars(target)), dict(vars(target.Thing))
        refused(lambda: ledger.apply(fix("one", {points})), {words!r})
        assert before == (dict(vars(target)), dict(vars(target.Thing)))
    """)


def test_the_first_alternative_that_exists_is_changed() -> None:
    check("""
        where = ("sglang.gone:function", "sglang.srt.target:gone", "sglang.srt.target:function")
        ledger.apply(fix("one", PatchPoint(where, How.AROUND, "tests.engine.bodies:named")))
        assert target.function(1) == ["named", "function", 1, 1]
    """)


def test_an_import_that_fails_inside_the_target_is_not_taken_for_a_missing_target() -> None:
    check("""
        import pathlib, sglang
        broken = fix("one", point("x", module="sglang.srt.broken"))
        import importlib.abc, importlib.machinery
        class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path=None, target=None):
                return importlib.machinery.ModuleSpec(name, self) if name == "sglang.srt.broken" else None
            def exec_module(self, module):
                import a_package_that_is_not_installed
        sys.meta_path.append(Finder())
        try:
            ledger.apply(broken)
        except ModuleNotFoundError as error:
            assert error.name == "a_package_that_is_not_installed"
        else:
            raise AssertionError("swallowed")
    """)


@pytest.mark.parametrize("form", ["enable", "stub", "object"])
def test_a_break_is_patched_inside_and_decorated_again(form: str) -> None:
    check(
        """
        from sglang.srt import breaks
        graphs, original = breaks.graphs, breaks.broken_operation
        module = "sglang.srt.breaks"
        refused(lambda: ledger.apply(fix("one", point("broken_operation", module=module))), "is a graph break")
        ledger.apply(fix("one", point("broken_operation", How.GRAPH_BREAK, "break_body", module=module)))
        assert type(breaks.broken_operation) is type(original) and breaks.broken_operation is not original
        graphs.capturing, out = True, []
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
        """,
        form,
    )


@pytest.mark.parametrize("form", ["enable", "stub", "object"])
@pytest.mark.parametrize("name", ["broken_operation", "forgotten"])
def test_two_fixes_of_one_break_are_both_live(form: str, name: str) -> None:
    check(
        f"""
        from sglang.srt import breaks
        places = point({name!r}, How.GRAPH_BREAK, "break_body", module="sglang.srt.breaks")
        ledger.apply(fix("one", places))
        ledger.apply(fix("two", places))
        assert ledger.read_back("one") == [] == ledger.read_back("two")
        assert ledger.wrapped("one") == [] == ledger.wrapped("two")
        ledger.undo("two")
        assert ledger.read_back("one") == []
        """,
        form,
    )


def test_a_break_that_is_a_method_keeps_binding_its_instance() -> None:
    check(
        """
        from sglang.srt import breaks
        original, layer, out = vars(breaks.Layer)["run"], breaks.Layer(), []
        how = How.GRAPH_BREAK
        ledger.apply(fix("one", point("Layer.run", how, "method_break_body", module="sglang.srt.breaks")))
        layer.run(1, out)
        layer.run.run_eager(2, out)
        breaks.graphs.capturing = True
        layer.run(3, out)
        breaks.graphs.breaks[0]()
        assert out == [1, "patched", 2, "patched", 3, "patched", 3, "patched"], out
        ledger.undo("one")
        assert vars(breaks.Layer)["run"] is original
        """,
        "object",
    )


@pytest.mark.parametrize("form", ["enable", "stub", "object"])
def test_a_forgotten_break_breaks_under_breakable_graphs_only(form: str) -> None:
    check(
        """
        from sglang.srt import breaks
        from sglang.srt.model_executor.breakable_cuda_graph import context
        original, graphs = breaks.forgotten, breaks.graphs
        ledger.apply(fix("one", point("forgotten", How.GRAPH_BREAK, "break_body", module="sglang.srt.breaks")))
        graphs.capturing, out = True, []
        breaks.forgotten(5, out)
        assert out == [5] and graphs.breaks == [], "other capture modes are left as they were"
        context.active = True
        breaks.forgotten(6, out)
        assert out == [5, 6, "patched"] and len(graphs.breaks) == 1
        graphs.breaks[0]()
        assert out == [5, 6, "patched", 6, "patched"]
        ledger.undo("one")
        assert breaks.forgotten is original
        """,
        form,
    )


def test_patching_a_function_that_a_break_holds_is_an_error() -> None:
    check("""
        from sglang.srt import breaks
        original = breaks.operation
        patched = fix("one", point("operation", body="around", module="sglang.srt.breaks"))
        refused(lambda: ledger.apply(patched), "sglang.srt.breaks:broken_operation's closure still holds")
        assert breaks.operation is original
    """)


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
@pytest.mark.parametrize("path", ["function", "Thing.method"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_plugin_on_the_same_target(release_root, release: str, path: str, first: str) -> None:
    source = release_root(release) / "sglang/srt/plugins/hook_registry.py"
    check(f"""
        import importlib.util, logging
        spec = importlib.util.spec_from_file_location("hook_registry", {str(source)!r})
        hooks = importlib.util.module_from_spec(spec)
        sys.modules["hook_registry"] = hooks
        spec.loader.exec_module(hooks)
        call = (lambda: target.function(7)) if {path!r} == "function" else (lambda: target.Thing().method(7))
        plain = call()
        def theirs(original, *args, **kwargs):
            return ["theirs", *original(*args, **kwargs)]
        def hook():
            hooks.HookRegistry.register("sglang.srt.target." + {path!r}, theirs, hooks.HookType.AROUND)
            hooks.HookRegistry.apply_hooks()
        ours = fix("one", point({path!r}))
        if {first!r} == "theirs":
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
            assert "sglang.srt.target:" + {path!r} in place and "hook_registry.py" in place, place
            assert "of fix" not in place, "its marks are copies of ours"
            refused(lambda: ledger.undo("one"), "hook_registry.py")
            assert call() == ["theirs", "around", *plain]
    """)


def test_a_forked_child_has_the_patch_and_its_undo_stays_there() -> None:
    check("""
        import os
        ledger.apply(fix("one", point("function")))
        child = os.fork()
        if not child:
            right = target.function(1) == ["around", "function", 1, 1]
            ledger.undo("one")
            os._exit(0 if right and target.function(1) == ["function", 1, 1] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert target.function(1) == ["around", "function", 1, 1] and ledger.read_back("one") == []
    """)


def test_a_spawned_child_starts_clean() -> None:
    check("""
        import concurrent.futures, multiprocessing
        ledger.apply(fix("one", point("function")))
        assert bodies.call_target(1) == ["around", "function", 1, 1]
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(bodies.call_target, 1).result() == ["function", 1, 1]
        assert bodies.call_target(1) == ["around", "function", 1, 1]
    """)
