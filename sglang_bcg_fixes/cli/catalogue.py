# SPDX-License-Identifier: Apache-2.0
"""Everything that has a name here: `bcg-fixes list` shows the names, and `bcg-fixes explain` one of them."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli.harmless import HARMLESS, Harmless
from sglang_bcg_fixes.cli.pip_faults import FAULTS, InstallationFault
from sglang_bcg_fixes.concern import Harm
from sglang_bcg_fixes.model import OURS, SECTIONS, Action, Choice, Decision, Fix, Kernel, Patched, Workaround
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.source import offered, verdicts
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source

# of the JSON: it changes with the meaning of a field, not with a new one
FORMAT = 1
Said = tuple[dict[str, Any], str]
Parts = Sequence[tuple[str, Iterable[str]]]


class CatalogueError(Exception):
    """There is no such name, or its page cannot be made."""


class State(str, enum.Enum):
    """The state of a defect in one SGLang, with the plugin: the one to act on first."""

    NOT_FIXED = "NOT FIXED"
    NOT_READ = "not read"
    OFF = "off"
    FIXED = "fixed"
    LATENT = "latent"
    NOT_HERE = "not here"


SAYS = {
    State.NOT_FIXED: "this version has no fix",
    State.NOT_READ: "nobody has read this form of the source",
    State.OFF: "the fix is switched off",
    State.FIXED: "the plugin fixes it",
    State.LATENT: "only code of your own meets it",
    State.NOT_HERE: "this SGLang does not have it",
}


def state_of(decision: Decision[Fix]) -> State:
    if decision.action is Action.NOT_NEEDED:
        return State.LATENT if decision.finding.verdict is Verdict.LATENT else State.NOT_HERE
    return {
        Action.NO_FIX: State.NOT_FIXED,
        Action.UNKNOWN: State.NOT_READ,
        Action.OFF: State.OFF,
    }.get(decision.action, State.FIXED)


def by_state(decisions: Iterable[Decision[Fix]]) -> dict[State, list[str]]:
    found: dict[State, list[str]] = {state: [] for state in State}
    for decision in decisions:
        found[state_of(decision)].append(decision.id)
    return found


def worst_harm(fix: Fix) -> Harm:
    """The worst that it does to anybody; a package that does not say is believed to mean wrong answers."""
    return min((concern.harm for concern in fix.concerns), key=place, default=Harm.WRONG)


def pages(known: Registry) -> Iterator[tuple[str, Callable[[], Said]]]:
    for fix in known.fixes:
        yield fix.id, functools.partial(on_fix, fix, known.owner(fix.id))
    for kernel in known.kernels:
        yield kernel.op, functools.partial(on_kernel, kernel, known.owner(kernel.op))
    for spot in HARMLESS:
        yield spot.id, functools.partial(on_harmless, spot)
    for fault in FAULTS:
        yield fault.id, functools.partial(on_fault, fault)


def by_its_flag(known: Registry) -> dict[str, Fix | Kernel]:
    subjects: tuple[Fix | Kernel, ...] = (*known.fixes, *known.kernels)
    return {subject.flag: subject for subject in subjects}


def explain(known: Registry, name: str) -> Said:
    """The page of a fix, a kernel, a harmless spot, a fault of an installation, or a flag."""
    rows = {row.name: row for row in flags.table(known.fixes, known.kernels)}
    by_flag = {name: subject.id for name, subject in by_its_flag(known).items()}
    found = dict(pages(known))
    asked = name.strip().upper()
    if asked in rows and asked not in by_flag:
        return on_flag(rows[asked])
    asked = by_flag.get(asked, asked.lower())
    if asked in found:
        try:
            return found[asked]()
        except ValueError as error:
            raise CatalogueError(f"{error} in the package {known.owner(asked)}") from error
    if name.upper().startswith("SGLANG"):
        raise CatalogueError(f"no flag '{name}'{flags.nearest(name, rows)}; {flags.LISTED}")
    general = [row for row in rows if row not in by_flag]
    nearest = flags.nearest(name, [*found, *general])
    raise CatalogueError(f"no defect, kernel or flag '{name}'{nearest}; `bcg-fixes list` shows all")


def page(kind: str, title: str, content: dict[str, Any], parts: Parts, owner: str) -> Said:
    """An answer for machines and the text of the same; a part without a line is left out."""
    lines = [title]
    for name, of in parts:
        lines += ["", name, *(f"  {line}" for line in of)] if (of := list(of)) else []
    if owner != OURS:
        lines += ["", f"Package: {owner}"]
    return {"format": FORMAT, "kind": kind, "owner": owner, **content}, "\n".join(lines)


def on_fix(fix: Fix, owner: str) -> Said:
    sections = {name: fix.section(name) for name in SECTIONS}
    found = list(verdicts.spans(fix.id))
    ways, without = workarounds(fix)
    content: dict[str, Any] = {
        "id": fix.id,
        "title": fix.title,
        "harm": worst_harm(fix).value,
        "releases": [{"releases": span, "verdict": verdict} for span, verdict in found],
        "concerns": [concern.says for concern in fix.concerns],
        "workarounds": [{"flags": way.flags, "effect": way.effect, "releases": span} for way, span in ways],
        "without_workaround": without,
        **{name.lower().replace(" ", "_"): text for name, text in sections.items()},
        "upstream": list(fix.upstream),
        "patches": patches(fix),
        "flag": {"name": fix.flag, "values": "|".join(flags.FIX_STATES), "default": fix.default}
        if fix.patches
        else None,
    }
    shown = [f"{span}  {way.flags} ({way.effect})" for way, span in ways]
    parts: Parts = [
        ("Releases", [f"{span}: {verdict}" for span, verdict in found]),
        ("Whom it concerns", content["concerns"]),
        ("Workarounds", [*shown, *([f"{without}  no flag of SGLang avoids it"] if without else [])]),
        *((name, [text]) for name, text in sections.items()),
        ("Upstream", fix.upstream),
        ("Patched places", places(fix)),
        ("Flag", [f"{fix.flag}=auto|off|on, by default {fix.default}"] if fix.patches else ["none: it has no fix yet"]),
    ]
    return page("defect", f"{fix.id}: {fix.title}", content, parts, owner)


def workarounds(fix: Fix) -> tuple[list[tuple[Workaround, str]], str]:
    """Each workaround with the releases that it is offered on, and the affected releases that have none."""
    table = verdicts.recorded()
    affected = [release for release, row in table.items() if row.get(fix.id) == Verdict.AFFECTED.value]
    # where no release is affected, your own code may lead there; of another package nothing is recorded
    meant = affected or list(table)
    found: dict[Workaround, list[str]] = {}
    without = []
    for release in meant:
        # doctor offers the first one that a release has
        way = next((way for way in fix.workarounds if offered.has_option(release, way.option)), None)
        if way:
            found.setdefault(way, []).append(release)
        else:
            without.append(release)
    return [(way, offered.spans(of)) for way, of in found.items()], offered.spans(without)


def on_kernel(kernel: Kernel, owner: str) -> Said:
    paragraphs = kernel.doc.strip().partition("\n")[2].strip().split("\n\n")
    states = kernel_states(kernel)
    content: dict[str, Any] = {
        "id": kernel.op,
        "title": kernel.title,
        "text": [" ".join(paragraph.split()) for paragraph in paragraphs],
        "implementations": [{"name": impl.name, "only_by_name": impl.only_by_name or None} for impl in kernel.impls],
        "concerns": [concern.says for concern in kernel.concerns],
        "patches": patches(kernel),
        "flag": {"name": kernel.flag, "values": states, "default": "auto"},
    }
    implementations = [
        impl.name + (f": only by name, {impl.only_by_name}" if impl.only_by_name else "") for impl in kernel.impls
    ]
    parts: Parts = [
        ("Purpose", content["text"]),
        ("Implementations", implementations),
        ("Patched places", places(kernel)),
        ("Flag", [f"{kernel.flag}={states}, by default auto"]),
    ]
    return page("kernel", f"{kernel.op}: {kernel.title}", content, parts, owner)


def kernel_states(kernel: Kernel) -> str:
    return "|".join(["auto", "off", *(impl.name for impl in kernel.impls)])


def patches(patched: Patched) -> list[dict[str, Any]]:
    return [{"where": list(point.where), "how": point.how.value} for point in patched.patches]


def places(patched: Patched) -> list[str]:
    return list(dict.fromkeys(f"{' or '.join(point.where)} ({point.how.value})" for point in patched.patches))


def on_harmless(spot: Harmless) -> Said:
    parts = [("Releases", [spot.releases]), ("Why it is harmless", [spot.reason]), ("Shown by", [spot.test])]
    return page("harmless", f"{spot.id}: {spot.title}", dataclasses.asdict(spot), parts, OURS)


def on_fault(fault: InstallationFault) -> Said:
    content = {"id": fault.id, "title": fault.title, "cause": fault.cause, "remedy": fault.remedy}
    parts = [("Cause", [fault.cause]), ("Remedy", [fault.remedy])]
    return page("installation", f"{fault.id}: {fault.title}", content, parts, OURS)


def on_flag(row: flags.Flag) -> Said:
    parts = [("Meaning", [row.doc]), ("Values", [row.values]), ("Default", [row.default])]
    return page("flag", row.name, vars(row), parts, OURS)


def listed(known: Registry, source: Source | None) -> Said:
    """Every defect by the harm that it does, with its state in this SGLang, then all else that has a page."""
    try:
        settings = known.settings()
    except flags.FlagError:
        # the command has warned of it; states are those by default
        settings = flags.read(known.fixes, known.kernels, {})
    made = plan.make(known, settings, source, watched_too=True) if source else None
    decisions = {decision.id: decision for decision in made.fixes} if made else {}
    states = {name: state_of(decision) for name, decision in decisions.items()}
    choices = {choice.op: choice for choice in made.kernels} if made else {}
    in_order = sorted(known.fixes, key=lambda fix: (place(worst_harm(fix)), place(states[fix.id]) if states else 0))
    defects = [
        {
            "id": fix.id,
            "title": fix.title,
            "harm": worst_harm(fix).value,
            "fix": bool(fix.patches),
            "owner": known.owner(fix.id),
            "state": states[fix.id].value if states else None,
            "reason": decisions[fix.id].reason if states else None,
            "affected": affected(fix.id),
        }
        for fix in in_order
    ]
    content = {
        "format": FORMAT,
        "sglang": source.version if source else None,
        "path": str(source.files) if source else None,
        "defects": defects,
        "kernels": [
            {
                "op": kernel.op,
                "title": kernel.title,
                "owner": known.owner(kernel.op),
                "runs": choices[kernel.op].name if choices else None,
                "rejected": dict(choices[kernel.op].rejected) if choices else None,
            }
            for kernel in known.kernels
        ],
        "harmless": [dataclasses.asdict(spot) for spot in HARMLESS],
        "installation": [{"id": fault.id, "title": fault.title, "remedy": fault.remedy} for fault in FAULTS],
    }
    return content, "\n".join(lines_of(known, content, choices))


def place(member: enum.Enum) -> int:
    """The place of a harm or a state among all of its kind, the one to act on first."""
    return list(type(member)).index(member)


def affected(fix_id: str) -> str:
    return offered.spans([r for r, row in verdicts.recorded().items() if row.get(fix_id) == Verdict.AFFECTED.value])


def lines_of(known: Registry, content: dict[str, Any], choices: Mapping[str, Choice]) -> Iterator[str]:
    defects = content["defects"]
    if content["sglang"]:
        yield f"{len(defects)} known defects, and their state in SGLang {content['sglang']}, {content['path']}"
        counts = {state: sum(row["state"] == state.value for row in defects) for state in State}
        yield from (f"  {state.value:11} {counts[state]}: {SAYS[state]}" for state in State if counts[state])
    else:
        yield f"No SGLang is installed here. {len(defects)} known defects, with the releases that have them"
    for harm in Harm:
        of = [row for row in defects if row["harm"] == harm.value]
        yield from ("", f"{harm.value}: {len(of)}") if of else ()
        for row in of:
            before = f"{row['state']:11} " if row["state"] else ""
            behind = "" if row["state"] else f" ({row['affected'] or 'no release'})"
            yield f"  {before}{row['id']}: {row['title']}{behind}{whose(row)}"
    yield from ("", "kernels, and what runs" if choices else "kernels")
    for row in content["kernels"]:
        choice = choices.get(row["op"])
        before = f"{'nothing' if choice.action is Action.BLOCKED else choice.name:11} " if choice else ""
        yield f"  {before}{row['op']}: {row['title']}{whose(row)}"
    yield from ("", "harmless spots", *(f"  {spot.id}: {spot.title}" for spot in HARMLESS))
    yield from ("", "faults of an installation", *(f"  {fault.id}: {fault.title}" for fault in FAULTS))
    yield from ("", f"`bcg-fixes explain NAME` explains one of these; {flags.LISTED}")


def whose(row: Mapping[str, Any]) -> str:
    return "" if row["owner"] == OURS else f" ({row['owner']})"


def listed_flags(known: Registry) -> Said:
    """Every flag; what a value means is said once."""
    rows = flags.table(known.fixes, known.kernels)
    lines = ["Set a flag in the environment of the server."]
    lines += [f"  {value:4}  {meaning}" for value, meaning in flags.VALUES.items()]
    subjects = by_its_flag(known)
    lines += ["", "All of them"]
    for row in rows:
        if row.name not in subjects:
            lines += [f"  {row.name}={row.values}, by default {row.default}", f"      {row.doc}"]
    lines += ["", "Kernels, each behind its default"]
    for row in rows:
        if isinstance(subject := subjects.get(row.name), Kernel):
            lines.append(f"  {row.default:4}  {row.name}={row.values}: {subject.title}")
    lines += ["", f"Fixes, {'|'.join(flags.FIX_STATES)}, each behind its default"]
    for row in rows:
        if isinstance(subject := subjects.get(row.name), Fix):
            lines.append(f"  {row.default:4}  {row.name}: {subject.title}")
    return {"format": FORMAT, "flags": [vars(row) for row in rows]}, "\n".join(lines)
