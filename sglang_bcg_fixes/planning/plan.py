"""What to do about each defect in this process: a pure function of fixes, settings and source."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from sglang_bcg_fixes.flags import Settings
from sglang_bcg_fixes.model import Accepted, Action, Choice, Decision, Fix, Impl, Kernel, PatchPoint, Rejected
from sglang_bcg_fixes.planning import proven
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.syntax import Drifted
from sglang_bcg_fixes.source.tree import Source, unknown


class PlanError(Exception):
    """The declared fixes contradict each other."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every decision, in the order of application."""

    version: str
    decisions: tuple[Decision, ...]
    kernels: tuple[Choice, ...]

    @property
    def digest(self) -> str:
        """Equal in two processes exactly when they do the same to the same source."""
        content = [
            [[d.id, d.action.value, [item.form for item in d.finding.evidence]] for d in self.decisions],
            [[choice.op, choice.name] for choice in self.kernels],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def having(self, action: Action) -> list[Decision]:
        return [decision for decision in self.decisions if decision.action is action]


def make(registry: Registry, settings: Settings, source: Source, watched_too: bool = False) -> Plan:
    """Probe everything, then decide; nothing is touched here.

    A defect without a fix is probed only where its verdict is shown (`watched_too`): a server need not pay for it.
    """
    wanted = [fix for fix in registry.fixes if fix.patches or watched_too]
    findings = {fix.id: ask(fix, source) for fix in wanted}
    decisions: dict[str, Decision] = {}
    for fix in in_order(wanted):
        decision = decide(fix, settings.fixes.get(fix.id, "off"), findings[fix.id], settings.off_by.get(fix.flag, ""))
        if decision.action is Action.APPLY:
            decision = with_needed_points(decision, source)
        decisions[fix.id] = decision
    kernels = tuple(choice_of(kernel, settings, source) for kernel in registry.kernels)
    return Plan(source.version, tuple(decisions.values()), kernels)


def ask(fix: Fix | Kernel, source: Source) -> Finding:
    """The verdict on one defect; a source in a form that nobody has read is unknown, whatever it looks like."""
    try:
        finding = fix.probe(source)
    except Drifted as drift:
        return unknown(f"this source has {drift}")
    except Exception as error:
        # one bad probe must not take the others down; unknown is shown, never silent
        return unknown(f"its probe failed: {type(error).__name__}: {error}")
    if not isinstance(finding, Finding):
        return unknown(f"its probe gives a {type(finding).__name__}, which is no Finding")
    read = forms.read_for(fix.id) | fix.known.keys()
    new = [item for item in finding.evidence if item.form not in read]
    if new and finding.verdict is not Verdict.UNKNOWN:
        reason = (
            f"{new[0]} is in a form that has not been read yet (it looks {finding.verdict.value}: {finding.reason})"
        )
        return Finding(Verdict.UNKNOWN, reason, finding.evidence)
    return finding


def decide(fix: Fix, state: str, finding: Finding, off_by: str = "") -> Decision:
    def decision(action: Action, reason: str) -> Decision:
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
    return decision(Action.APPLY, finding.reason)


def with_needed_points(decision: Decision, source: Source) -> Decision:
    points = needed_points(decision.fix, source)
    # as of a probe: one bad fix must not take the others down
    if isinstance(points, str):
        return dataclasses.replace(decision, action=Action.UNKNOWN, reason=points)
    return dataclasses.replace(decision, fix=dataclasses.replace(decision.fix, patches=points))


def choice_of(kernel: Kernel, settings: Settings, source: Source) -> Choice:
    state, off_by = settings.kernels.get(kernel.op, "off"), settings.off_by.get(kernel.flag, "")
    choice = with_points(choose(kernel, state, ask(kernel, source), off_by), source)
    return dataclasses.replace(choice, proven=proven.is_proven(kernel.op, choice.finding))


def with_points(choice: Choice, source: Source) -> Choice:
    """The choice with the places that this source needs; without an implementation where they cannot be told."""
    points = needed_points(choice.kernel, source) if choice.impl else ()
    if isinstance(points, str):
        finding = dataclasses.replace(choice.finding, verdict=Verdict.UNKNOWN, reason=points)
        return choose(choice.kernel, choice.state, finding, choice.off_by)
    return dataclasses.replace(choice, kernel=dataclasses.replace(choice.kernel, patches=points))


def needed_points(patched: Fix | Kernel, source: Source) -> tuple[PatchPoint, ...] | str:
    """Where this source is changed, or why that cannot be said."""
    try:
        points = tuple(point for point in patched.patches if point.needed(source))
    except Exception as error:
        return f"its patch points cannot be chosen: {type(error).__name__}: {error}"
    return points or f"{patched.id} is affected, but every patch point says that it is not needed"


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
    chosen: list[Impl] = []
    rejected: dict[str, str] = {}
    for impl in kernel.impls:
        reason = off_by if state == "off" else rejection(kernel, impl, state, finding)
        if reason:
            rejected[impl.name] = reason
        elif chosen:
            rejected[impl.name] = f"{chosen[0].name} is preferred"
        if not reason:
            chosen.append(impl)
    return Choice(kernel, chosen[0] if chosen else None, rejected, finding, state, tuple(chosen[1:]), off_by)


def rejection(kernel: Kernel, impl: Impl, state: str, finding: Finding) -> str:
    if state not in ("auto", impl.name):
        return f"{kernel.flag}={state}"
    if state == "auto" and impl.only_by_name:
        return f"only with {kernel.flag}={impl.name}: {impl.only_by_name}"
    if finding.verdict is not Verdict.AFFECTED:
        return finding.reason
    # integers are equal or not, on a CPU too; what rounds otherwise has to be seen on a GPU
    if state == "auto" and kernel.tolerance and not proven.is_proven(kernel.op, finding):
        return f"only with {kernel.flag}={impl.name}: unproven on this release, no GPU has run it on this source yet"
    try:
        answer: Accepted | Rejected = impl.accepts()
    except Exception as error:
        return f"it cannot be asked: {type(error).__name__}: {error}"
    return answer.reason if isinstance(answer, Rejected) else ""
