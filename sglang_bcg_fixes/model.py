# SPDX-License-Identifier: Apache-2.0
"""The nouns of this package, frozen and free of torch: fixes, kernels, patches, decisions."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from sglang_bcg_fixes import __version__
from sglang_bcg_fixes.concern import Concern, Condition
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source

OURS = "sglang-bcg-fixes"
SECTIONS = ("Symptom", "Cause", "Change", "Remove when")


class How(str, enum.Enum):
    """The ways a patch point can be changed."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    # inside a break: what it runs, at capture and at every replay
    GRAPH_BREAK = "graph_break"
    # outside a break: the call that makes it, which a replay does not repeat
    AROUND_BREAK = "around_break"


class Action(str, enum.Enum):
    """The plan for one fix or kernel in this process."""

    APPLY = "apply"
    NOT_NEEDED = "not needed"
    OFF = "off"
    UNKNOWN = "unknown"
    NO_FIX = "no fix"
    BLOCKED = "blocked"


@dataclasses.dataclass(frozen=True)
class PatchPoint:
    """One place to change.

    `where` lists alternatives "package.module:Class.attribute"; the first that exists is changed. `body` is the
    function that does the work, or its name as "package.module:function" where that module is to be imported only then;
    its parameters are bound by name, so it must use the names of the function that it changes. `aliases` are further
    places that hold the same object and that a scan of module attributes cannot see, such as
    "package.module:TABLE['key']". `needed` leaves a point out where a source has only another part of the defect: right
    code is not patched. `asked` leaves it to processes whose flag asks for the fix, or, if it is false, to those that
    have the fix by default.
    """

    where: tuple[str, ...]
    how: How
    body: Callable[..., Any] | str
    aliases: tuple[str, ...] = ()
    needed: Callable[[Source], bool] = lambda source: True
    asked: bool | None = None


@dataclasses.dataclass(frozen=True)
class Patch:
    """Places that are changed together, under a name: what is left of a fix once it is decided on."""

    id: str
    patches: tuple[PatchPoint, ...]


class Patched(Protocol):
    """Anything with patch points: a fix, a kernel, or a patch alone."""

    @property
    def id(self) -> str: ...

    @property
    def patches(self) -> tuple[PatchPoint, ...]: ...


def modules_of(patched: Patched) -> list[str]:
    """Every module that may be changed, in the order of the patch points."""
    places = [where for point in patched.patches for where in point.where]
    return list(dict.fromkeys(where.partition(":")[0] for where in places))


@dataclasses.dataclass(frozen=True)
class Workaround:
    """Flags of SGLang that avoid a defect.

    `option` must exist in the installed source for the flags to be offered: flag names differ between releases.
    """

    flags: str
    option: str
    effect: str


def flag_of(fix_id: str) -> str:
    return f"SGLANG_BCG_FIX_{fix_id.upper()}"


def flag_of_kernel(op: str) -> str:
    return f"SGLANG_BCG_KERNEL_{op.upper()}"


@dataclasses.dataclass(frozen=True)
class Fix:
    """Everything known about one defect; without `patches` it is only watched for.

    The flag and the page follow from `id`. `doc` has a title line and the sections Symptom, Cause, Change and Remove
    when. A file in `fixes/` says neither: the registry takes the file's stem and docstring. `known` maps the form
    (hash) of every definition that the probe has been read against to a note on what it is: a definition in any other
    form makes the verdict unknown. Both are for other packages; forms of our own fixes are in source/forms.json.
    `default` is "auto" or "off"; `after` names fixes that are applied before this one. A `guard` watches for models
    that are not written yet, so it is applied where its defect is latent too. `concerns` are the launches that the
    defect does harm to; where there are none it may be any. One that is for speed alone names in `measured` the
    launches that it changes with "auto", and is off then on a source that `proven.json` has no results of.
    """

    id: str = ""
    doc: str = ""
    _: dataclasses.KW_ONLY
    probe: Callable[[Source], Finding]
    upstream: tuple[str, ...] = ()
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patches: tuple[PatchPoint, ...] = ()
    workarounds: tuple[Workaround, ...] = ()
    default: str = "auto"
    guard: bool = False
    after: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()
    concerns: tuple[Concern, ...] = ()
    measured: tuple[Condition, ...] = ()

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0].rstrip(".")

    @property
    def flag(self) -> str:
        return flag_of(self.id)

    @property
    def is_on_request(self) -> bool:
        """Tell whether some launches, or all, have it only if its flag asks for it."""
        return self.default == "off" or bool(self.measured)

    def section(self, name: str) -> str:
        """The text of one section of the docstring, folded to one paragraph."""
        titles = "|".join(SECTIONS)
        found = re.search(rf"^{name}: (.*?)(?=^(?:{titles}): |\Z)", self.doc, re.MULTILINE | re.DOTALL)
        if not found:
            raise ValueError(f"{self.id}: its docstring has no section '{name}:'; add it to the file of the fix")
        return " ".join(found.group(1).split())


@dataclasses.dataclass(frozen=True)
class Accepted:
    """An implementation can run here."""


@dataclasses.dataclass(frozen=True)
class Rejected:
    """An implementation cannot run here, and why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Impl:
    """One implementation of an operation: reference, triton or cuda.

    `accepts` is asked at start-up, before torch is imported. `module` holds the operation's functions; where it has a
    function `ready(device)`, that is asked before the first use and may still refuse. An implementation that `auto`
    passes over says why in `only_by_name`. One that `auto` takes on some GPUs only names them in `measured_on`, such as
    sm_90; elsewhere it runs if it is named.
    """

    name: str
    accepts: Callable[[], Accepted | Rejected]
    module: str
    only_by_name: str = ""
    measured_on: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operation with its implementations in order of preference, and where SGLang is made to call it.

    `probe` answers affected where the places to change are known; `known` is like that of a fix: in any other form
    of source SGLang keeps its own code. `awaits` names the modules whose import is waited for, where not each one that
    is changed will do: with the first of them the others are imported. One that is not `bit_exact` rounds differently
    from SGLang's own code. `auto` takes one of ours only on a source that
    `proven.json` has results of. `concerns` are the launches whose time it takes less of.
    """

    op: str
    doc: str
    impls: tuple[Impl, ...]
    probe: Callable[[Source], Finding]
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patches: tuple[PatchPoint, ...] = ()
    bit_exact: bool = True
    awaits: tuple[str, ...] = ()
    concerns: tuple[Concern, ...] = ()

    @property
    def id(self) -> str:
        return self.op

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0].rstrip(".")

    @property
    def flag(self) -> str:
        return flag_of_kernel(self.op)


Subject = TypeVar("Subject", bound=Fix | Kernel, covariant=True)
AnyDecision = TypeVar("AnyDecision", bound="Decision[Any]")


@dataclasses.dataclass(frozen=True)
class Decision(Generic[Subject]):
    """The plan for one fix or kernel, and the reason.

    The `subject` of one that is applied has only the patch points that this source needs, in the modules `places`, and
    `modules` are those whose import it waits for: the first of them will do.
    """

    # SGLang's own code is wrong without it
    mends: ClassVar[bool] = True

    subject: Subject
    action: Action
    reason: str
    finding: Finding
    required: bool = False
    modules: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    # the package that contributes it
    owner: str = OURS

    @property
    def id(self) -> str:
        return self.subject.id

    @property
    def whose(self) -> str:
        """The id, with its package where that is another one."""
        return self.id if self.owner == OURS else f"{self.id} of {self.owner}"

    @property
    def asked_for(self) -> str:
        """The setting that wants it."""
        return self.subject.flag

    @property
    def remedy(self) -> str:
        """The next step for a user whose server does not start without it."""
        return (
            f"Set SGLANG_BCG_FIXES=auto, or {self.subject.flag}=off, to serve without it; `bcg-fixes doctor` shows a "
            f"workaround"
        )

    @property
    def awaited(self) -> list[str]:
        """The modules to wait for, in any release: with the first of them the others are imported."""
        return modules_of(self.subject)

    def is_needed(self, strict: bool) -> bool:
        """Tell whether the process ends where it is missing."""
        return self.required or (strict and self.mends)

    def without_places(self: AnyDecision, reason: str) -> AnyDecision:
        """The decision where the patch points cannot be chosen."""
        return dataclasses.replace(self, action=Action.UNKNOWN, reason=reason)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "owner": self.owner,
            "action": self.action.value,
            "reason": self.reason,
            "verdict": self.finding.verdict.value,
            "finding": self.finding.reason,
            "evidence": [dataclasses.asdict(item) for item in self.finding.evidence],
            "required": self.required,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Decision[Kernel]):
    """A decision on a kernel: the implementation that will run, why the others will not, and its successors.

    `others` take over, in order, where `impl` fails on the device. `proven`: recorded GPU results speak for it.
    """

    mends: ClassVar[bool] = False

    state: str
    impl: Impl | None
    rejected: Mapping[str, str]
    others: tuple[Impl, ...] = ()
    proven: bool = True

    @property
    def op(self) -> str:
        return self.subject.op

    @property
    def name(self) -> str:
        """The owner of the code that runs: an implementation of ours, or SGLang."""
        return self.impl.name if self.impl else "sglang"

    @property
    def asked_for(self) -> str:
        return f"{self.subject.flag}={self.state}"

    @property
    def remedy(self) -> str:
        return "Set it to auto or off to serve with SGLang's own code; `bcg-fixes doctor` shows what can run"

    @property
    def awaited(self) -> list[str]:
        return list(self.subject.awaits) or super().awaited

    def said(self, state: str) -> str:
        """The implementation and its state for the log line, and that no GPU has seen it on such a source."""
        return f"{self.name} ({state}{'' if self.proven else ', unproven on this release'})"

    def without_places(self, reason: str) -> Choice:
        rejected = dict.fromkeys((impl.name for impl in self.subject.impls), reason)
        return dataclasses.replace(self, action=Action.UNKNOWN, reason=reason, impl=None, others=(), rejected=rejected)

    def as_dict(self) -> dict[str, Any]:
        return {
            "impl": self.name,
            "owner": self.owner,
            "proven": self.proven,
            "rejected": dict(self.rejected),
            "evidence": [dataclasses.asdict(item) for item in self.finding.evidence],
        }


@dataclasses.dataclass(frozen=True)
class Retired:
    """A name that was a flag: `since` and the version after it warn, and `refused_from` on it is a mistake again.

    A flag that was renamed counts as the one that it is called `now`. The versions are those of the package that had
    it; the registry sets which package that is, and its installed version.
    """

    name: str
    since: str
    refused_from: str
    why: str
    now: str = ""
    owner: str = OURS
    version: str = __version__

    @property
    def id(self) -> str:
        return self.name

    @property
    def listed(self) -> str | None:
        """The fix or kernel that it switched, by which SGLANG_BCG_OFF names it."""
        found = re.fullmatch(r"SGLANG_BCG_(?:FIX|KERNEL)_(\w+)", self.name)
        return found[1].lower() if found else None

    @property
    def is_refused(self) -> bool:
        return series(self.version) >= series(self.refused_from)

    @property
    def says(self) -> str:
        whose = "" if self.owner == OURS else f"{self.owner} "
        return f"was retired in {whose}{self.since}: {self.why}"


def series(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: the third one retires nothing."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
