"""The nouns of this package, frozen and free of torch: what a fix is, what a probe found, what was decided."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_fixes.source.finding import Finding, Verdict
from sglang_bcg_fixes.source.tree import Source

SECTIONS = ("Symptom", "Cause", "Change", "Remove when")


class How(str, enum.Enum):
    """The ways a patch point can be changed."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    GRAPH_BREAK = "graph_break"


class Action(str, enum.Enum):
    """What the plan does about one defect in this process."""

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
    code is not patched.
    """

    where: tuple[str, ...]
    how: How
    body: Callable[..., Any] | str
    aliases: tuple[str, ...] = ()
    needed: Callable[[Source], bool] = lambda source: True


@dataclasses.dataclass(frozen=True)
class Patch:
    """Places that are changed together, under a name: what is left of a fix once it is decided on."""

    id: str
    patches: tuple[PatchPoint, ...]


@dataclasses.dataclass(frozen=True)
class Mitigation:
    """A way round a defect with SGLang's own flags.

    `option` must exist in the installed source for the flags to be offered: flag names differ between releases.
    """

    flags: str
    option: str
    effect: str


@dataclasses.dataclass(frozen=True)
class Fix:
    """Everything known about one defect; without `patches` it is only watched for.

    `id` is the stem of the file that declares it; the flag and the page follow from it. `doc` is that file's
    docstring, with a title line and the sections Symptom, Cause, Change and Remove when. `known` maps the form (hash)
    of every definition that the probe has been read against to a note on what it is: a definition in any other form
    makes the verdict unknown. It is for other packages; forms of our own fixes are in source/forms.json. `default` is
    "auto" or "off"; `after` names fixes that are applied before this one. A `guard` watches for models that are not
    written yet, so it is applied where its defect is latent too.
    """

    id: str
    doc: str
    upstream: tuple[str, ...]
    probe: Callable[[Source], Finding]
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patches: tuple[PatchPoint, ...] = ()
    mitigations: tuple[Mitigation, ...] = ()
    default: str = "auto"
    guard: bool = False
    after: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0].rstrip(".")

    @property
    def flag(self) -> str:
        return f"SGLANG_BCG_FIX_{self.id.upper()}"

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
    passes over says why in `only_by_name`.
    """

    name: str
    accepts: Callable[[], Accepted | Rejected]
    module: str
    only_by_name: str = ""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operation with its implementations in order of preference, and where SGLang is made to call it.

    `probe` answers affected where the places to change are known; `known` is like that of a fix: in any other form
    of source SGLang keeps its own code. `awaits` names the modules whose import is waited for, where not each one that
    is changed will do: with the first of them the others are imported.
    """

    op: str
    doc: str
    impls: tuple[Impl, ...]
    probe: Callable[[Source], Finding]
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    patches: tuple[PatchPoint, ...] = ()
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=dict)
    awaits: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.op

    @property
    def title(self) -> str:
        return self.doc.strip().partition("\n")[0].rstrip(".")

    @property
    def flag(self) -> str:
        return f"SGLANG_BCG_KERNEL_{self.op.upper()}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the plan does about one defect, and why."""

    fix: Fix
    action: Action
    reason: str
    finding: Finding
    required: bool = False

    @property
    def id(self) -> str:
        return self.fix.id

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "action": self.action.value,
            "reason": self.reason,
            "verdict": self.finding.verdict.value,
            "finding": self.finding.reason,
            "evidence": [dataclasses.asdict(item) for item in self.finding.evidence],
            "required": self.required,
        }


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of one operation that will run, why the others will not, and who follows where it fails."""

    kernel: Kernel
    impl: Impl | None
    rejected: Mapping[str, str]
    finding: Finding
    state: str
    others: tuple[Impl, ...] = ()
    # the setting that keeps SGLang's own code, where one does
    off_by: str = ""
    # that a GPU has run it on this source
    proven: bool = True

    @property
    def op(self) -> str:
        return self.kernel.op

    @property
    def name(self) -> str:
        """Whose code runs: an implementation of ours, or SGLang's own."""
        return self.impl.name if self.impl else "sglang"

    @property
    def required(self) -> bool:
        return self.state not in ("auto", "off")

    @property
    def why(self) -> str:
        """Why nothing of ours runs, where that is so."""
        if self.state == "off":
            return self.off_by
        if self.finding.verdict is not Verdict.AFFECTED:
            return self.finding.reason
        return "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())

    @property
    def without_ours(self) -> Action:
        """What is said of an operation that runs SGLang's own code."""
        found = {Verdict.ABSENT: Action.NOT_NEEDED, Verdict.UNKNOWN: Action.UNKNOWN}
        if self.state == "off" or self.finding.verdict not in found:
            return Action.BLOCKED if self.required else Action.OFF
        return found[self.finding.verdict]

    def as_dict(self) -> dict[str, Any]:
        return {
            "impl": self.name,
            "proven": self.proven,
            "rejected": dict(self.rejected),
            "evidence": [dataclasses.asdict(item) for item in self.finding.evidence],
        }
