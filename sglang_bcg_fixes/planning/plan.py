# SPDX-License-Identifier: Apache-2.0
"""The plan for one process: a pure function of fixes, settings and source."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from sglang_bcg_fixes.flags import Settings
from sglang_bcg_fixes.model import (
    Accepted,
    Action,
    AnyDecision,
    Choice,
    Decision,
    Fix,
    Impl,
    Kernel,
    Rejected,
    modules_of,
)
from sglang_bcg_fixes.planning import proven
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.syntax import Drifted
from sglang_bcg_fixes.source.tree import Source, unknown

UNPROVEN = "unproven on this release, no recorded GPU result speaks for it on this source"
# a source that its probe rules out or does not know keeps SGLang's own code
WITHOUT_KERNEL = {Verdict.ABSENT: Action.NOT_NEEDED, Verdict.UNKNOWN: Action.UNKNOWN}


class PlanError(Exception):
    """The declared fixes contradict each other."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every decision on this source."""

    version: str
    fixes: tuple[Decision[Fix], ...]
    kernels: tuple[Choice, ...]

    @property
    def decisions(self) -> tuple[Decision[Any], ...]:
        """All of them in the order of application.

        Fixes go around kernels: some change what is handed to the function that a kernel replaces.
        """
        return (*self.kernels, *self.fixes)

    @property
    def applied(self) -> list[Decision[Any]]:
        return [decision for decision in self.decisions if decision.action is Action.APPLY]

    @property
    def digest(self) -> str:
        """Equal in two processes exactly when they do the same to the same source."""
        content = [
            [[d.id, d.action.value, d.required, [item.form for item in d.finding.evidence]] for d in self.fixes],
            [[choice.op, choice.name] for choice in self.kernels],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def make(registry: Registry, settings: Settings, source: Source, watched_too: bool = False) -> Plan:
    """Probe everything, then decide; nothing is touched here.

    A defect without a fix is probed only where its verdict is shown (`watched_too`): a server need not pay for it.
    """
    wanted = in_order([fix for fix in registry.fixes if fix.patches or watched_too])
    fixes = [on_fix(fix, settings, source) for fix in wanted]
    kernels = [on_kernel(kernel, settings, source) for kernel in registry.kernels]

    def placed(decision: AnyDecision) -> AnyDecision:
        decision = dataclasses.replace(decision, owner=registry.owner(decision.id))
        return with_needed_points(decision, source) if decision.action is Action.APPLY else decision

    return Plan(source.version, tuple(map(placed, fixes)), tuple(map(placed, kernels)))


def on_fix(fix: Fix, settings: Settings, source: Source) -> Decision[Fix]:
    state = settings.fixes.get(fix.id, "off")
    return decide(fix, state, ask(fix, source), settings.off_by.get(fix.flag, ""))


def on_kernel(kernel: Kernel, settings: Settings, source: Source) -> Choice:
    state = settings.kernels.get(kernel.op, "off")
    return choose(kernel, state, ask(kernel, source), settings.off_by.get(kernel.flag, ""))


def ask(fix: Fix | Kernel, source: Source) -> Finding:
    """The verdict on one defect; a source in a form that nobody has read is always unknown."""
    try:
        finding = fix.probe(source)
    except Drifted as drift:
        return unknown(f"this source has {drift}")
    except Exception as error:
        # one bad probe must not take the others down; unknown is shown, never silent
        return unknown(f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(finding, Finding):
        return unknown(f"its probe gives a {type(finding).__name__}, which is not a Finding")
    read = forms.read_for(fix.id) | fix.known.keys()
    new = [item for item in finding.evidence if item.form not in read]
    if new and finding.verdict is not Verdict.UNKNOWN:
        reason = (
            f"{new[0]} is in a form that has not been read yet (it looks {finding.verdict.value}: {finding.reason})"
        )
        return Finding(Verdict.UNKNOWN, reason, finding.evidence)
    return finding


def decide(fix: Fix, state: str, finding: Finding, off_by: str = "") -> Decision[Fix]:
    def decision(action: Action, reason: str) -> Decision[Fix]:
        return Decision(fix, action, reason, finding, required=state == "on")

    if finding.verdict in (Verdict.FIXED, Verdict.ABSENT):
        return decision(Action.NOT_NEEDED, finding.reason)
    if finding.verdict is Verdict.LATENT and state != "on" and not fix.guard:
        return decision(Action.NOT_NEEDED, f"{finding.reason}; {fix.flag}=on is for code of your own that leads there")
    if not fix.patches:
        if finding.verdict is Verdict.UNKNOWN:
            return decision(Action.UNKNOWN, finding.reason)
        return decision(Action.NO_FIX, f"this version has no fix for it: {finding.reason}")
    if state == "off":
        return decision(Action.OFF, off_by or f"{fix.flag}=off")
    if finding.verdict is Verdict.UNKNOWN:
        return decision(Action.UNKNOWN, finding.reason)
    if state == "auto" and fix.measured and not proven.is_proven(fix.id, finding):
        return decision(Action.OFF, f"only with {fix.flag}=on: {UNPROVEN}")
    return decision(Action.APPLY, finding.reason)


def with_needed_points(decision: AnyDecision, source: Source) -> AnyDecision:
    """The decision with the patch points that this source needs, and the modules of it to wait for."""
    subject = decision.subject
    try:
        points = tuple(
            point for point in subject.patches if point.asked in (None, decision.required) and point.needed(source)
        )
    except Exception as error:
        # as of a probe: one bad fix must not take the others down
        return decision.without_places(f"its patch points cannot be chosen: {type(error).__name__}: {error}")
    if not points:
        return decision.without_places(f"{subject.id} is affected, but every patch point says that it is not needed")
    placed = dataclasses.replace(decision, subject=dataclasses.replace(subject, patches=points))
    there = {name: source.has_module(name) for name in (*placed.awaited, *modules_of(placed.subject))}
    modules, places = (
        tuple(name for name in names if there[name]) for names in (placed.awaited, modules_of(placed.subject))
    )
    return dataclasses.replace(placed, modules=modules, places=places)


def in_order(fixes: list[Fix]) -> list[Fix]:
    """By id, each behind those that it names in `after`."""
    left = sorted(fixes, key=lambda fix: fix.id)
    ids = {fix.id for fix in left}
    done: list[Fix] = []
    while left:
        ready = [fix for fix in left if not (set(fix.after) & ids) - {earlier.id for earlier in done}]
        if not ready:
            raise PlanError(f"`after` goes in a circle between {', '.join(fix.id for fix in left)}")
        done.append(ready[0])
        left.remove(ready[0])
    return done


def choose(kernel: Kernel, state: str, finding: Finding, off_by: str = "") -> Choice:
    """The first implementation that is wanted and accepts; every other one with its reason."""
    off_by = off_by or f"{kernel.flag}=off"
    accepted: list[Impl] = []
    rejected: dict[str, str] = {}
    for impl in kernel.impls:
        reason = off_by if state == "off" else rejection(kernel, impl, state, finding)
        if reason:
            rejected[impl.name] = reason
        elif accepted:
            rejected[impl.name] = f"{accepted[0].name} is preferred"
        if not reason:
            accepted.append(impl)
    required = state not in ("auto", "off")
    action = Action.BLOCKED if required else Action.OFF
    if accepted:
        action, why = Action.APPLY, finding.reason
    elif state == "off":
        why = off_by
    elif finding.verdict is not Verdict.AFFECTED:
        action, why = WITHOUT_KERNEL.get(finding.verdict, action), finding.reason
    else:
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    return Choice(
        kernel,
        action,
        why,
        finding,
        required,
        state=state,
        impl=accepted[0] if accepted else None,
        rejected=rejected,
        others=tuple(accepted[1:]),
        proven=proven.is_proven(kernel.op, finding),
    )


def rejection(kernel: Kernel, impl: Impl, state: str, finding: Finding) -> str:
    if state not in ("auto", impl.name):
        return f"{kernel.flag}={state}"
    if state == "auto" and impl.only_by_name:
        return f"only with {kernel.flag}={impl.name}: {impl.only_by_name}"
    if finding.verdict is not Verdict.AFFECTED:
        return finding.reason
    # a CPU shows that integers are equal; a GPU, that what rounds differently is right, and that nothing is slower
    if state == "auto" and not proven.is_proven(kernel.op, finding):
        return f"only with {kernel.flag}={impl.name}: {UNPROVEN}"
    try:
        answer: Accepted | Rejected = impl.accepts()
    except Exception as error:
        return f"it cannot be asked: {type(error).__name__}: {error}"
    return answer.reason if isinstance(answer, Rejected) else ""
