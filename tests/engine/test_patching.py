# SPDX-License-Identifier: Apache-2.0
"""Every kind of definition, changed and restored in many orders; each case in a process of its own."""

from __future__ import annotations

import pytest

from tests import processes, wheels
from tests.wheels import NEWEST

KINDS = (
    "function",
    "Thing.method",
    "Thing.made",
    "Thing.static",
    "Thing.size",
    "Thing.inherited",
    "Thing.inherited_class",
    "Thing.inherited_static",
)
HOWS = ("around", "after", "replace", "before")
FORMS = ("enable", "stub", "object")


def check(scenario: str, *arguments: str, form: str = "enable") -> None:
    """Run one of `tests/scenarios/patching.py` beside the fake SGLang; its assertions are the test's."""
    done = processes.python(
        *("-m", "tests.scenarios.patching", scenario, *arguments),
        paths=[processes.FAKE_SGLANG],
        environment={"FAKE_FORM": form},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("how", HOWS)
def test_every_kind_is_changed_and_restored(path: str, how: str) -> None:
    check("every_kind", path, how)


@pytest.mark.parametrize("path", KINDS)
def test_two_fixes_on_one_target_come_off_in_reverse_only(path: str) -> None:
    check("two_fixes", path)


def test_a_fix_that_another_one_has_replaced_is_not_live() -> None:
    check("replaced_by_another")


def test_a_fix_is_found_in_what_holds_it_and_not_by_its_mark() -> None:
    check("found_in_holders")


def test_a_second_apply_is_refused_and_changes_nothing() -> None:
    check("second_apply")


def test_a_failure_in_the_middle_rolls_everything_back() -> None:
    check("failure_in_the_middle")


def test_copies_follow_within_sglang_only() -> None:
    check("copies_follow")


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
    check("undeclared_holder", module, path, place)


def test_a_holder_that_appears_between_two_fixes_is_found() -> None:
    check("holder_between_two_fixes")


def test_a_holder_of_what_an_earlier_fix_has_put_there_is_found() -> None:
    check("holder_of_an_earlier_fix")


def test_fixes_that_are_checked_together_answer_for_their_own_holders() -> None:
    check("checked_together")


def test_a_holder_that_a_later_fix_has_replaced_is_found() -> None:
    check("holder_replaced_by_a_later_fix")


def test_what_a_fix_imports_itself_is_looked_at_too() -> None:
    check("imported_by_the_fix")


def test_a_function_among_the_builtins_is_found() -> None:
    check("held_by_builtins")


def test_looking_for_holders_asks_nothing_of_strange_objects() -> None:
    check("strange_objects")


@pytest.mark.parametrize(
    ("path", "alias"),
    [("function", "sglang.srt.tables:BY_NAME['function']"), ("Thing.method", "sglang.srt.class_alias:Other.borrowed")],
)
def test_declared_aliases_are_changed_and_restored(path: str, alias: str) -> None:
    check("declared_alias", path, alias)


@pytest.mark.parametrize(
    ("module", "path", "body", "words"),
    [
        ("sglang.srt.target", "Thing", "around", "is a class; patch its methods"),
        ("sglang.srt.target", "kernel", "around", "patch the function that launches it"),
        ("sglang.srt.target", "Thing.width", "around", "not a function"),
        ("sglang.srt.target", "function", "misnamed", "takes (x, y, *), but misnamed expects (x, z, *)"),
        ("sglang.srt.target", "missing", "around", "no sglang.srt.target:missing"),
        ("sglang.srt.gone", "x", "around", "no module sglang.srt.gone"),
    ],
)
def test_what_cannot_be_patched_is_refused_by_name(module: str, path: str, body: str, words: str) -> None:
    check("not_patchable", module, path, body, words)


def test_the_first_alternative_that_exists_is_changed() -> None:
    check("first_alternative")


def test_an_import_that_fails_inside_the_target_is_not_taken_for_a_missing_target() -> None:
    check("import_that_fails")


@pytest.mark.parametrize("form", FORMS)
def test_a_break_is_patched_inside_and_decorated_again(form: str) -> None:
    check("break_decorated_again", form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_break_is_gone_round_at_capture_alone(form: str) -> None:
    check("break_gone_round", form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["broken_operation", "forgotten"])
def test_two_fixes_of_one_break_are_both_live(form: str, name: str) -> None:
    check("two_fixes_of_a_break", name, form=form)


def test_what_this_package_puts_around_a_fix_for_a_while_is_not_named_as_foreign() -> None:
    check("stands_inside_what_this_package_put_there")


def test_a_break_that_is_a_method_keeps_binding_its_instance() -> None:
    check("break_of_a_method", form="object")


@pytest.mark.parametrize("form", FORMS)
def test_a_forgotten_break_breaks_under_breakable_graphs_only(form: str) -> None:
    check("forgotten_break", form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_break_that_another_plugin_stands_around_is_refused(form: str) -> None:
    check("break_inside_another_plugin", form=form)


def test_patching_a_function_that_a_break_holds_is_an_error() -> None:
    check("function_that_a_break_holds")


@pytest.mark.parametrize("release", ["0.5.12.post1", NEWEST])
@pytest.mark.parametrize("path", ["function", "Thing.method"])
@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_plugin_on_the_same_target(release: str, path: str, first: str) -> None:
    check("another_plugin", str(wheels.unpacked(release) / "sglang/srt/plugins/hook_registry.py"), path, first)


def test_a_forked_child_has_the_patch_and_its_undo_stays_there() -> None:
    check("forked_child")


def test_a_spawned_child_starts_clean() -> None:
    check("spawned_child")
