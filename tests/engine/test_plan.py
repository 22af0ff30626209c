# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.model import Accepted, Action, Fix, Impl, Kernel, PatchPoint, Rejected
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.source.finding import Evidence, Finding, Verdict
from sglang_bcg_fixes.source.tree import Source
from tests.engine.bodies import KNOWN, fix, kernel, point


class NoFiles:
    def read(self, path: str) -> str | None:
        return None

    def modules(self, folder: str) -> list[str]:
        return []


def fix_with(name: str, verdict: Verdict, *points: PatchPoint, **changes: Any) -> Fix:
    made = fix(name, *(points or (point("function"),)))
    return dataclasses.replace(made, probe=lambda source: Finding(verdict, "because"), **changes)


def actions(*fixes: Fix, **environ: str) -> dict[str, Action]:
    settings = flags.read(fixes, [], environ)
    made = plan.make(Registry(fixes, ()), settings, Source(NoFiles()), watched_too=True)
    return {decision.id: decision.action for decision in made.decisions}


# verdict x state of the flag x whether there is a fix: every row that can occur
@pytest.mark.parametrize(
    ("verdict", "state", "action"),
    [
        (Verdict.AFFECTED, "auto", Action.APPLY),
        (Verdict.AFFECTED, "on", Action.APPLY),
        (Verdict.AFFECTED, "off", Action.OFF),
        (Verdict.LATENT, "auto", Action.NOT_NEEDED),
        (Verdict.LATENT, "on", Action.APPLY),
        (Verdict.LATENT, "off", Action.NOT_NEEDED),
        (Verdict.FIXED, "auto", Action.NOT_NEEDED),
        (Verdict.FIXED, "on", Action.NOT_NEEDED),
        (Verdict.FIXED, "off", Action.NOT_NEEDED),
        (Verdict.ABSENT, "auto", Action.NOT_NEEDED),
        (Verdict.ABSENT, "on", Action.NOT_NEEDED),
        (Verdict.UNKNOWN, "auto", Action.UNKNOWN),
        (Verdict.UNKNOWN, "on", Action.UNKNOWN),
        (Verdict.UNKNOWN, "off", Action.OFF),
    ],
)
def test_decisions(verdict: Verdict, state: str, action: Action) -> None:
    assert actions(fix_with("one", verdict), SGLANG_BCG_FIX_ONE=state) == {"one": action}


@pytest.mark.parametrize(("state", "action"), [("auto", Action.APPLY), ("on", Action.APPLY), ("off", Action.OFF)])
def test_a_guard_is_applied_where_its_defect_is_latent(state: str, action: Action) -> None:
    assert actions(fix_with("one", Verdict.LATENT, guard=True), SGLANG_BCG_FIX_ONE=state) == {"one": action}


@pytest.mark.parametrize("verdict", [Verdict.AFFECTED, Verdict.LATENT, Verdict.FIXED, Verdict.ABSENT])
def test_a_form_that_nobody_has_read_makes_any_verdict_unknown(verdict: Verdict) -> None:
    seen = tuple(Evidence(f"package:{form}", "package.py", 7, form) for form in ("read", "new"))
    asked = dataclasses.replace(fix("one"), probe=lambda source: Finding(verdict, "because", seen))
    both, one = (dataclasses.replace(asked, known=dict.fromkeys(forms, "")) for forms in (("read", "new"), ("read",)))
    assert plan.ask(both, Source(NoFiles())) == Finding(verdict, "because", seen)
    unknown = plan.ask(one, Source(NoFiles()))
    assert unknown.verdict is Verdict.UNKNOWN and unknown.evidence == seen
    assert unknown.reason == (
        f"package.py:7 new [new] is in a form that has not been read yet (it looks {verdict.value}: because)"
    )


def test_a_fix_is_found_by_its_id() -> None:
    one, two = fix("one"), fix("two")
    registry = Registry((one, two), ())
    assert [registry.fix(name) for name in ("one", "two", "three")] == [one, two, None]


def test_a_latent_defect_says_how_its_fix_is_had() -> None:
    made = plan.make(
        Registry((fix_with("one", Verdict.LATENT),), ()),
        flags.read([fix_with("one", Verdict.LATENT)], [], {}),
        Source(NoFiles()),
    )
    assert "SGLANG_BCG_FIX_ONE=on is for code of your own" in made.decisions[0].reason


@pytest.mark.parametrize(
    ("verdict", "action"),
    [
        (Verdict.AFFECTED, Action.NO_FIX),
        (Verdict.LATENT, Action.NOT_NEEDED),
        (Verdict.FIXED, Action.NOT_NEEDED),
        (Verdict.ABSENT, Action.NOT_NEEDED),
        (Verdict.UNKNOWN, Action.UNKNOWN),
    ],
)
def test_a_watched_defect_is_never_applied(verdict: Verdict, action: Action) -> None:
    assert actions(dataclasses.replace(fix_with("one", verdict), patches=())) == {"one": action}


def test_a_server_does_not_probe_what_it_cannot_mend() -> None:
    def never(source: Source) -> Finding:
        raise AssertionError("probed")

    watched = dataclasses.replace(fix("watched"), probe=never)
    made = plan.make(Registry((watched,), ()), flags.read([watched], [], {}), Source(NoFiles()))
    assert made.decisions == ()


def test_a_probe_that_raises_is_unknown_and_takes_no_other_down() -> None:
    def broken(source: Source) -> Finding:
        raise ZeroDivisionError("by zero")

    bad = dataclasses.replace(fix("bad", point("function")), probe=broken)
    assert actions(bad, fix_with("good", Verdict.AFFECTED)) == {"bad": Action.UNKNOWN, "good": Action.APPLY}
    assert "ZeroDivisionError: by zero" in plan.ask(bad, Source(NoFiles())).reason


def test_a_point_that_a_source_does_not_need_is_left_out() -> None:
    needed, not_needed = point("function"), dataclasses.replace(point("Thing.method"), needed=lambda source: False)
    both = fix_with("both", Verdict.AFFECTED, needed, not_needed)
    made = plan.make(Registry((both,), ()), flags.read([both], [], {}), Source(NoFiles()))
    assert made.decisions[0].subject.patches == (needed,)
    none, one = fix_with("none", Verdict.AFFECTED, not_needed), fix_with("one", Verdict.AFFECTED)
    assert actions(none, one) == {"none": Action.UNKNOWN, "one": Action.APPLY}
    alone = plan.make(Registry((none,), ()), flags.read([none], [], {}), Source(NoFiles()))
    assert alone.decisions[0].reason == "none is affected, but every patch point says that it is not needed"


def test_order_follows_after_and_then_the_id() -> None:
    a, b, c = (
        fix_with("a", Verdict.AFFECTED, after=("c",)),
        fix_with("b", Verdict.AFFECTED),
        fix_with("c", Verdict.AFFECTED, after=("not_there",)),
    )
    for given in itertools.permutations([a, b, c]):
        assert list(actions(*given)) == ["b", "c", "a"]


def test_a_circle_is_an_error() -> None:
    with pytest.raises(plan.PlanError, match="a, b"):
        actions(fix_with("a", Verdict.AFFECTED, after=("b",)), fix_with("b", Verdict.AFFECTED, after=("a",)))


def test_the_digest_tells_plans_apart_and_nothing_else() -> None:
    def digest(*fixes: Fix, **environ: str) -> str:
        return plan.make(Registry(fixes, ()), flags.read(fixes, [], environ), Source(NoFiles())).digest

    one = fix_with("one", Verdict.AFFECTED)
    assert digest(one) == digest(one, SGLANG_BCG_FIXES="strict", SGLANG_BCG_REPORT_DIR="/elsewhere")
    assert digest(one) != digest(one, SGLANG_BCG_FIX_ONE="off")


NAMES = ("cuda", "triton", "reference")


def answering(answer: Accepted | Rejected) -> Callable[[], Accepted | Rejected]:
    return lambda: answer


def kernel_of(*accepts: Accepted | Rejected, only_by_name: str = "") -> Kernel:
    impls = [Impl(name, answering(answer), "m") for name, answer in zip(NAMES, accepts, strict=True)]
    impls[-1] = dataclasses.replace(impls[-1], only_by_name=only_by_name)
    return kernel("metadata", *impls)


def test_the_first_implementation_that_accepts_runs_and_the_others_say_why_not() -> None:
    op = kernel_of(Rejected("no driver"), Accepted(), Accepted())
    auto = plan.choose(op, "auto", KNOWN)
    assert auto.impl and auto.impl.name == "triton"
    assert auto.rejected == {"cuda": "no driver", "reference": "triton is preferred"}
    assert [impl.name for impl in auto.others] == ["reference"]
    told = plan.choose(op, "reference", KNOWN)
    assert told.impl and told.impl.name == "reference" and told.required
    assert told.rejected["triton"] == "SGLANG_BCG_KERNEL_METADATA=reference"
    assert plan.choose(op, "off", KNOWN).impl is None
    lacking = plan.choose(op, "cuda", KNOWN)
    assert lacking.impl is None and "cuda: no driver" in lacking.reason


def test_auto_passes_over_what_is_only_for_those_who_name_it() -> None:
    op = kernel_of(Rejected("no driver"), Rejected("no triton"), Accepted(), only_by_name="slow")
    auto = plan.choose(op, "auto", KNOWN)
    assert auto.impl is None and not auto.required
    assert auto.rejected["reference"] == "only with SGLANG_BCG_KERNEL_METADATA=reference: slow"
    assert auto.action is Action.OFF
    named = plan.choose(op, "reference", KNOWN)
    assert named.impl and named.impl.name == "reference"


@pytest.mark.parametrize("state", ["auto", "triton"])
def test_a_kernel_whose_points_cannot_be_chosen_takes_no_other_along(state: str) -> None:
    def broken(source: Source) -> bool:
        raise ZeroDivisionError("by zero")

    impl = Impl("triton", Accepted, "m")
    good = dataclasses.replace(kernel("good", impl), patches=(point("function"),))
    bad = dataclasses.replace(kernel("bad", impl), patches=(dataclasses.replace(point("function"), needed=broken),))
    settings = flags.read([], [bad, good], {bad.flag: state})
    choices = plan.make(Registry((), (bad, good)), settings, Source(NoFiles())).kernels
    assert choices[1].impl and not choices[0].impl
    assert choices[0].reason == "its patch points cannot be chosen: ZeroDivisionError: by zero"
    assert choices[0].action is Action.UNKNOWN and choices[0].required is (state == "triton")


def test_an_unknown_source_gets_no_kernel_and_is_not_asked_for_one() -> None:
    def never() -> Accepted:
        raise AssertionError("must not be asked")

    op = kernel("metadata", Impl("triton", never, "m"))
    choice = plan.choose(op, "auto", Finding(Verdict.UNKNOWN, "nobody has read it"))
    assert choice.impl is None and choice.reason == "nobody has read it" and choice.action is Action.UNKNOWN
    assert choice.rejected == {"triton": "nobody has read it"}
