# SPDX-License-Identifier: Apache-2.0
"""The examination of one SGLang's source, without importing it and without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from sglang_bcg_fixes import __version__, flags
from sglang_bcg_fixes.cli import pip_faults
from sglang_bcg_fixes.cli.harmless import HARMLESS
from sglang_bcg_fixes.model import OURS, Action, Decision, Fix, Workaround
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.process import report_folders
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

ENTRY_POINT = "bcg_fixes"
# of the JSON: it changes with the meaning of a field, not with a new one
FORMAT = 1
PLUGIN_GROUP = "sglang.srt.plugins"

WOULD = {
    Action.APPLY: "the fix would be applied",
    Action.NOT_NEEDED: "nothing to do",
    Action.OFF: "the fix is switched off",
    Action.UNKNOWN: "nothing would be changed: the source is not one we know",
    Action.NO_FIX: "watched for; this version has no fix",
}


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
        }

    def text(self, everything: bool) -> str:
        order = {Verdict.AFFECTED: 0, Verdict.UNKNOWN: 1, Verdict.LATENT: 2, Verdict.FIXED: 3, Verdict.ABSENT: 4}
        decisions = sorted(self.plan.fixes, key=lambda d: (order[d.finding.verdict], d.id))
        lines = [f"SGLang {self.source.version} in {self.source.files}: {len(decisions)} known defects", self.summary()]
        lines += [f"another SGLang is in {folder}; Python imports the first" for folder in self.others]
        lines.append("")
        for decision in decisions:
            if everything or decision.finding.verdict is not Verdict.LATENT:
                lines += describe(decision, self.source, everything)
        for fault, reason in self.faults:
            lines += [f"install   {fault.id}: {fault.title}", f"{'':10}reason     {reason}"]
            lines.append(f"{'':10}remedy     {fault.remedy}")
        for spot in HARMLESS if everything else ():
            lines += [f"harmless  {spot.id}: {spot.title}", f"{'':10}releases   {spot.releases}"]
            lines += [f"{'':10}reason     {spot.reason}", f"{'':10}shown by   {spot.test}"]
        for choice in self.plan.kernels:
            lines.append(f"kernel    {choice.op}: {choice.subject.title}")
            lines += package(choice)
            runs = choice.impl.name if choice.impl else "SGLang, its own code"
            if choice.action is Action.BLOCKED:
                runs = f"nothing, {choice.subject.flag}={choice.state} lets no server start here"
            lines.append(f"{'':10}would run  {runs}")
            if choice.impl and not choice.proven:
                own = f"{choice.subject.flag}=off keeps SGLang's own code"
                lines.append(f"{'':10}unproven   no recorded GPU result speaks for it on this source; {own}")
            lines += [f"{'':10}not {name:6} {reason}" for name, reason in choice.rejected.items()]
        refusals = [f"no server starts with the plugin: {problem}" for problem in self.problems]
        last = [*refusals, *self.look_alikes, *self.retired, *filter(None, (self.running, self.loading))]
        lines += ["", *last] if last else []
        return "\n".join(lines)

    def summary(self) -> str:
        counts = {verdict: 0 for verdict in Verdict}
        for decision in self.plan.fixes:
            counts[decision.finding.verdict] += 1
        unmended = [d.id for d in self.plan.fixes if d.action is Action.NO_FIX]
        text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
        text += f"; {sum(d.action is Action.APPLY for d in self.plan.fixes)} would be mended"
        if unmended:
            text += f"; {len(unmended)} without a fix in this version, use their workaround: {', '.join(unmended)}"
        if self.wanted_but_missing:
            text += f"; WANTED AND MISSING: {', '.join(d.id for d in self.wanted_but_missing)}"
        return text


def examine(known: Registry, settings: flags.Settings, source: Source, installed: bool) -> Examination:
    made = plan.make(known, settings, source, watched_too=True)
    # what is not installed here is judged by what pip would put next to it
    faults = pip_faults.check_all(source, installed_version if installed else lambda name: None)
    strangers, retired = tuple(flags.look_alikes(known.fixes, known.kernels)), tuple(flags.said_of(known.retired))
    loading, running = (loading_problem(), report_folders.running()) if installed else (None, None)
    others = tuple(releases.others_on_the_path(source)) if installed else ()
    return Examination(source, made, faults, loading, running, strangers, retired, known.problems, others)


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


def loading_problem() -> str | None:
    """Explain why SGLang would not load this plugin in this environment, or return None."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)}
    if ENTRY_POINT not in names:
        return (
            "SGLang will NOT load the plugin: it is not installed in this environment; run `pip install .` there, in a "
            "checkout of sglang-bcg-fixes"
        )
    chosen = [name.strip() for name in flags.plugin_choice().split(",") if name.strip()]
    if chosen and ENTRY_POINT not in chosen:
        return (
            f"SGLang will NOT load the plugin: SGLANG_PLUGINS={','.join(chosen)} does not name {ENTRY_POINT}, and "
            f"SGLang says nothing about names it does not know; add {ENTRY_POINT} to it"
        )
    return None
