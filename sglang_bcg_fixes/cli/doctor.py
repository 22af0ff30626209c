# SPDX-License-Identifier: Apache-2.0
"""The examination of one SGLang's source, without importing it and without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import catalogue, pip_faults
from sglang_bcg_fixes.cli.harmless import HARMLESS
from sglang_bcg_fixes.cli.server_command import names_in
from sglang_bcg_fixes.concern import Harm
from sglang_bcg_fixes.model import OURS, Action, Choice, Decision, Fix, Workaround
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.process import report_folders
from sglang_bcg_fixes.source import releases, verdicts
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

ENTRY_POINT = "bcg_fixes"
# of the JSON: it changes with the meaning of a field, not with a new one
FORMAT = 2
PLUGIN_GROUP = "sglang.srt.plugins"

WOULD = {
    Action.APPLY: "the fix would be applied",
    Action.NOT_NEEDED: "nothing to do",
    Action.OFF: "the fix is switched off",
    Action.UNKNOWN: "nothing would be changed: nobody has read this source",
    Action.NO_FIX: "reported; this version has no fix",
}
# exit statuses
GOOD, TO_DO, UNREAD = 0, 1, 3


@dataclasses.dataclass(frozen=True)
class Examination:
    """Everything that doctor says, ready to be printed or dumped."""

    source: Source
    plan: plan.Plan
    faults: list[tuple[pip_faults.InstallationFault, str]]
    loading: str | None
    running: str | None = None
    look_alikes: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    # folders of another SGLang on the path
    others: tuple[str, ...] = ()
    # in this environment
    is_installed: bool = False

    @property
    def status(self) -> int:
        """The exit status: 1 where nothing would be fixed or no server starts, 3 where some source is unread."""
        if self.loading or self.problems or self.blocked or (self.faults and self.is_installed):
            return TO_DO
        return UNREAD if self.wanted_but_missing else GOOD

    @property
    def blocked(self) -> list[str]:
        """The kernels that are named and cannot run: no server starts with such a setting."""
        return [f"{c.subject.flag}={c.state}" for c in self.plan.kernels if c.action is Action.BLOCKED]

    @property
    def wanted_but_missing(self) -> list[Decision[Fix]]:
        """Fixes that are switched on and that this source would not get."""
        return [d for d in self.plan.fixes if d.action is Action.UNKNOWN and d.subject.patches]

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "package": __version__,
            "sglang": self.source.version,
            "path": str(self.source.files),
            "others": list(self.others),
            "plan": self.plan.digest,
            "loading": self.loading,
            "running": self.running,
            "look_alikes": list(self.look_alikes),
            "retired": list(self.retired),
            "problems": list(self.problems),
            "installation": [
                {"id": fault.id, "title": fault.title, "reason": reason, "remedy": fault.remedy}
                for fault, reason in self.faults
            ],
            "defects": [
                {
                    **decision.as_dict(),
                    "title": fix.title,
                    "flag": fix.flag if fix.patches else None,
                    "mitigation": dataclasses.asdict(way) if (way := workaround(fix, self.source)) else None,
                }
                for decision in self.plan.fixes
                for fix in (decision.subject,)
            ],
            "harmless": [dataclasses.asdict(spot) for spot in HARMLESS],
            "kernels": {choice.op: choice.as_dict() for choice in self.plan.kernels},
            "wanted_but_missing": [decision.id for decision in self.wanted_but_missing],
            "status": self.status,
        }

    def text(self, everything: bool) -> str:
        return "\n".join(self.everything() if everything else self.in_short())

    def in_short(self) -> Iterator[str]:
        """By harm, the defects that would be fixed and those that would not be, on a screen."""
        yield from self.beginning()
        for harm in Harm:
            shown = (d for d in self.plan.fixes if d.finding.verdict is Verdict.AFFECTED)
            of_harm = [d for d in shown if catalogue.worst_harm(d.subject) is harm]
            fixed = [d.id for d in of_harm if d.action is Action.APPLY]
            left = [d for d in of_harm if d.action is not Action.APPLY]
            if fixed:
                yield f"fixed     {harm.value} ({len(fixed)}): {', '.join(fixed)}"
            for decision in left:
                state = "off" if decision.action is Action.OFF else "NOT FIXED"
                yield f"{state:9} {harm.value}: {decision.whose}: {decision.subject.title}"
        guards = [d.id for d in self.plan.fixes if d.finding.verdict is Verdict.LATENT and d.action is Action.APPLY]
        if guards:
            yield f"guarded   no model of SGLang's meets it ({len(guards)}): {', '.join(guards)}"
        if self.wanted_but_missing:
            yield f"NOT READ  ({len(self.wanted_but_missing)}): {', '.join(d.id for d in self.wanted_but_missing)}"
        yield from (line_of(*found) for found in self.faults)
        if self.is_installed:
            on = [f"{choice.op}={choice.name}" for choice in self.plan.kernels if choice.impl]
            yield f"kernels   {', '.join(on) or 'none of ours would run here'}"
        yield from self.end()
        yield from self.ungated()
        yield "next: bcg-fixes doctor --model FOLDER -- FLAGS says what concerns one server; --all has evidence"

    def ungated(self) -> Iterator[str]:
        """Say why the exit status does not count defects without a fix."""
        left = [d for d in self.plan.fixes if d.action is Action.NO_FIX and d.finding.verdict is Verdict.AFFECTED]
        if left and self.status != TO_DO:
            yield f"exit status {self.status} leaves out the {len(left)} NOT FIXED: give your launch command for those"

    def everything(self) -> Iterator[str]:
        order = {Verdict.AFFECTED: 0, Verdict.UNKNOWN: 1, Verdict.LATENT: 2, Verdict.FIXED: 3, Verdict.ABSENT: 4}
        yield from self.beginning()
        yield ""
        for decision in sorted(self.plan.fixes, key=lambda d: (order[d.finding.verdict], d.id)):
            yield from describe(decision, self.source, True)
        for fault, reason in self.faults:
            yield from (f"install   {fault.id}: {fault.title}", f"{'':10}reason     {reason}")
            yield f"{'':10}remedy     {fault.remedy}"
        for spot in HARMLESS:
            yield from (f"harmless  {spot.id}: {spot.title}", f"{'':10}releases   {spot.releases}")
            yield from (f"{'':10}reason     {spot.reason}", f"{'':10}shown by   {spot.test}")
        for choice in self.plan.kernels:
            yield from describe_kernel(choice)
        yield from ("", *self.end())

    def beginning(self) -> Iterator[str]:
        yield f"SGLang {self.source.version} in {self.source.files}: {len(self.plan.fixes)} known defects"
        yield self.summary()
        yield from (f"another SGLang is in {folder}; Python imports the first" for folder in self.others)

    def end(self) -> Iterator[str]:
        yield from (f"no server starts with the plugin: {problem}" for problem in self.problems)
        yield from (f"no server starts with {setting}: it cannot run here" for setting in self.blocked)
        yield from (*self.look_alikes, *self.retired, *filter(None, (self.running, self.loading)))

    def summary(self) -> str:
        counts = {verdict: 0 for verdict in Verdict}
        for decision in self.plan.fixes:
            counts[decision.finding.verdict] += 1
        words = {Verdict.FIXED: "fixed by SGLang", Verdict.UNKNOWN: "not read"}
        text = ", ".join(f"{count} {words.get(verdict, verdict.value)}" for verdict, count in counts.items())
        return f"{text}; {sum(d.action is Action.APPLY for d in self.plan.fixes)} would be fixed by the plugin"


def line_of(fault: pip_faults.InstallationFault, reason: str) -> str:
    return f"install   {fault.id}: {fault.title}: {reason}; {fault.remedy}"


def describe_kernel(choice: Choice) -> Iterator[str]:
    yield f"kernel    {choice.op}: {choice.subject.title}"
    yield from package(choice)
    runs = choice.impl.name if choice.impl else "SGLang, its own code"
    if choice.action is Action.BLOCKED:
        runs = f"nothing, {choice.subject.flag}={choice.state} lets no server start here"
    yield f"{'':10}would run  {runs}"
    if choice.impl and not choice.proven:
        own = f"{choice.subject.flag}=off keeps SGLang's own code"
        yield f"{'':10}unproven   no recorded GPU result speaks for it on this source; {own}"
    yield from (f"{'':10}not {name:6} {reason}" for name, reason in choice.rejected.items())


def examine(
    known: Registry,
    settings: flags.Settings,
    source: Source,
    installed: bool,
    environ: Mapping[str, str] | None = None,
) -> Examination:
    made = plan.make(known, settings, source, watched_too=True)
    # what is not installed here is judged by what pip would put next to it
    faults = pip_faults.check_all(source, installed_version if installed else lambda name: None)
    every = flags.environment_with(environ or {})
    strangers = tuple(flags.look_alikes(known.fixes, known.kernels, every))
    retired = tuple(flags.said_of(known.retired, every))
    loading = loading_problem(environ) if installed else choice_problem(environ or {})
    running = report_folders.running() if installed else None
    others = tuple(releases.others_on_the_path(source)) if installed else ()
    return Examination(source, made, faults, loading, running, strangers, retired, known.problems, others, installed)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(decision: Decision[Fix], source: Source, everything: bool) -> list[str]:
    """A header, and for what concerns this source also evidence, action, switch and workaround."""
    fix, finding = decision.subject, decision.finding
    lines = [f"{finding.verdict.value:9} {fix.id}: {fix.title}", *package(decision)]
    if finding.verdict in (Verdict.FIXED, Verdict.ABSENT) and not everything:
        return lines
    lines.append(f"{'':10}source     {finding.reason}")
    lines += [f"{'':10}evidence   {item}" for item in finding.evidence]
    if finding.verdict in (Verdict.FIXED, Verdict.ABSENT):
        return lines
    is_off = decision.action is Action.OFF
    lines.append(f"{'':10}action     {WOULD[decision.action]}{f': {decision.reason}' if is_off else ''}")
    if fix.patches:
        lines.append(f"{'':10}switch     {fix.flag}={'on' if is_off else 'off'}")
    way = workaround(fix, source)
    shown = f"{way.flags}  ({way.effect})" if way else "no flag of this release avoids it"
    lines.append(f"{'':10}workaround {shown}")
    return lines


def package(decision: Decision[Any]) -> list[str]:
    """Name the owner of what is not ours."""
    return [] if decision.owner == OURS else [f"{'':10}package    {decision.owner}"]


def workaround(fix: Fix, source: Source) -> Workaround | None:
    """The first workaround whose option this release has."""
    return next((way for way in fix.workarounds if source.has_option(way.option)), None)


def loading_problem(environ: Mapping[str, str] | None = None) -> str | None:
    """Explain why SGLang would not load this plugin in this environment, or return None."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if ENTRY_POINT not in names:
        return (
            "SGLang will NOT load the plugin: it is not installed in this environment; run `pip install .` there, in a "
            "checkout of sglang-bcg-fixes"
        )
    return choice_problem(environ)


def choice_problem(environ: Mapping[str, str] | None) -> str | None:
    """Explain by these variables why a server would go without the plugin, or return None."""
    chosen = names_in(flags.plugin_choice(environ))
    if chosen and ENTRY_POINT not in chosen:
        return (
            f"SGLang will NOT load the plugin: SGLANG_PLUGINS={','.join(chosen)} does not name {ENTRY_POINT}, and "
            f"SGLang says nothing about names it does not know; add {ENTRY_POINT} to it"
        )
    if flags.is_off(environ):
        return f"{flags.EVERYTHING}=off: the plugin changes and checks nothing; unset it"
    return None


def activity(environ: Mapping[str, str] | None = None) -> str:
    """Tell whether a server of this environment gets the plugin, and by what."""
    problem = loading_problem(environ)
    if problem:
        return "no"
    if chosen := names_in(flags.plugin_choice(environ)):
        return f"yes, SGLANG_PLUGINS names it; SGLang loads {' and '.join(chosen)}, and no other plugin"
    return "yes, it is installed and SGLANG_PLUGINS is unset, so SGLang loads it"


def supported() -> tuple[str, ...]:
    """The releases that this package has been read against."""
    return tuple(verdicts.recorded())


def series_of(version: str) -> tuple[int, ...]:
    """The numbers of a version, to be compared."""
    return tuple(map(int, re.findall(r"\d+", version)))
