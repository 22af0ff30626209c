# SPDX-License-Identifier: Apache-2.0
"""The plan and its outcome: one log line, and a file per process for `bcg-fixes status`."""

from __future__ import annotations

import atexit
import dataclasses
import json
import multiprocessing
import os
import pathlib
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sglang_bcg_fixes import __version__
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.model import Action, AnyDecision, Choice, Decision, Fix
from sglang_bcg_fixes.planning.plan import Plan
from sglang_bcg_fixes.process import procfs
from sglang_bcg_fixes.process.this_server import Served
from sglang_bcg_fixes.process.watch import ReadBack
from sglang_bcg_fixes.source.finding import Verdict

APPLIED = "applied"
FAILED = "failed"
LOST = "lost"
PENDING = "pending"
UNREAD = "unread"
# states in which a fix that is wanted is not there
MISSING = (FAILED, LOST, UNREAD, Action.BLOCKED.value)
# the states whose fixes the line for debugging always names, and those where it does when there are some
ALWAYS = (APPLIED, Action.OFF.value, UNREAD)
SOMETIMES = (PENDING, FAILED, LOST, Action.BLOCKED.value)
# of the line that each scheduler logs
LONGEST = 200
OFF_SWITCH = "SGLANG_BCG=off"
# for this model, where nothing is lost either
NO_FIX_NEEDED = "none of its fixes needed, 0 unread, 0 lost"
# of the counts in that line, those that it names where there are none
ALWAYS_COUNTED = ("fixes live", "unread", "lost")


class ReportError(Exception):
    """The folder of the reports cannot be trusted or written."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The state of one decision in this process, verified where something was changed."""

    decision: Decision[Any]
    state: str
    detail: str

    @property
    def is_switched_off(self) -> bool:
        """Tell whether somebody has turned off a fix that this source needs."""
        by_default = isinstance(self.decision.subject, Fix) and self.decision.subject.is_on_request
        is_needed = self.decision.finding.verdict is Verdict.AFFECTED and not by_default
        return self.state == Action.OFF.value and is_needed

    def as_dict(self) -> dict[str, Any]:
        switched_off = {"switched_off": True} if self.is_switched_off else {}
        return {**self.decision.as_dict(), "state": self.state, "detail": self.detail, **switched_off}


@dataclasses.dataclass
class Report:
    """Everything about the plugin in one process; outcomes change when a pending fix is applied."""

    plan: Plan
    is_strict: bool = False
    is_checked: bool = True
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    read_back: ReadBack | None = None
    served: Served | None = None
    selfcheck: dict[str, Any] | None = None
    canary: dict[str, int] | None = None

    def settled(self, decisions: Iterable[AnyDecision]) -> Iterator[tuple[AnyDecision, Outcome]]:
        """Those that have an outcome already, with it."""
        return ((each, self.outcomes[each.id]) for each in decisions if each.id in self.outcomes)

    def note(self, name: str, state: str, problem: str | None) -> None:
        """Change the state of a fix or kernel; without a problem it is there for the planned reason."""
        outcome = self.outcomes[name]
        detail = problem or outcome.decision.reason
        self.outcomes[name] = dataclasses.replace(outcome, state=state, detail=detail)

    def state(self, name: str) -> str:
        return self.outcomes[name].state

    def states(self) -> dict[str, str]:
        found = {name: outcome.state for name, outcome in self.outcomes.items()}
        return {**found, "selfcheck": self.selfcheck["verdict"]} if self.selfcheck else found

    def ids(self, state: str) -> list[str]:
        """The fixes in this state."""
        return [decision.id for decision, outcome in self.settled(self.plan.fixes) if outcome.state == state]

    def concerns(self, decision: Decision[Any]) -> bool | None:
        """Tell whether it may matter to the model of this process; None before that is known."""
        return decision.id in self.served.concerned if self.served else None

    def summary(self) -> str:
        """The one line that a scheduler logs, about what concerns its model."""
        lost = self.read_back.lost if self.read_back else {}
        here = [each for each in self.settled(self.plan.fixes) if self.concerns(each[0]) and each[0].id not in lost]
        states = [outcome.state for _, outcome in here]
        live = states.count(APPLIED) if self.read_back else 0
        # whatever is lost counts: that it may matter is reason enough
        counts = {
            "fix live" if live == 1 else "fixes live": live,
            "unread": states.count(UNREAD),
            "lost": sum(each.id in lost for each in self.plan.fixes),
            "failed": states.count(FAILED),
            "pending": states.count(PENDING),
            "switched off": sum(outcome.is_switched_off for _, outcome in here),
        }
        told = ", ".join(f"{number} {word}" for word, number in counts.items() if number or word in ALWAYS_COUNTED)
        if self.served and not any(counts.values()):
            told = NO_FIX_NEEDED
        model, rank = (self.served.model, self.served.rank) if self.served else ("no model", process_name())
        running = (self.implementation(each, outcome) for each, outcome in self.settled(self.plan.kernels))
        kernels = [implementation for implementation in running if implementation]
        begin, strict = f"bcg-fixes {__version__}: sglang {self.plan.version} ", ", strict" if self.is_strict else ""
        end = f"self-check {self.checked}; more: bcg-fixes status; off: {OFF_SWITCH}"
        none = (*self.no_kernel(), "kernel none")
        for shown in (f"kernel {', '.join(kernels)}", f"{len(kernels)} kernels") if kernels else none:
            middle = f" {rank}{strict}: {told}; {shown}; {end}"
            if len(begin + model + middle) <= LONGEST:
                return begin + model + middle
        return f"{begin}{model[: max(LONGEST - len(begin + middle) - 3, 0)]}...{middle}"

    def implementation(self, choice: Choice, outcome: Outcome) -> str:
        """Name the implementation that runs of a kernel, such as gdn_extend=cuda.

        Nothing where none runs, or not for this model. One that names no launches concerns those that call it.
        """
        if choice.impl is None or outcome.state != APPLIED or not self.concerns(choice):
            return ""
        found, is_declared = active.so_far(choice.op), bool(choice.subject.concerns)
        if not is_declared and (found["left"] or not call_counts.TALLY.sum(choice.op)):
            return ""
        return f"{choice.op}={found['impl']}{' in part' if found['left'] else ''}"

    def no_kernel(self) -> Iterator[str]:
        """The first kernel that is left to SGLang's own code, and why, up to the first comma."""
        for choice, outcome in self.settled(self.plan.kernels):
            found = active.so_far(choice.op) if outcome.state == APPLIED and self.concerns(choice) else {}
            if left := found.get("left"):
                yield f"no {choice.op}: {left[0].partition(', ')[0]}"
                return

    @property
    def checked(self) -> str:
        """The result of the self-check in two words, such as "right 7/7"."""
        return self.selfcheck["short"] if self.selfcheck else "none" if self.is_checked else "off"

    def line(self) -> str:
        """The state of everything in this process, for debugging."""
        states = [*ALWAYS, *(state for state in SOMETIMES if self.ids(state))]
        parts = [f"{state} {', '.join(self.ids(state)) or 'none'}" for state in states]
        # what is right here needs no name: `status` has them
        parts.append(f"{len(self.ids(Action.NOT_NEEDED.value))} {Action.NOT_NEEDED.value}")
        ours = [
            f"{each.op} {each.said(outcome.state)}" for each, outcome in self.settled(self.plan.kernels) if each.impl
        ]
        parts += [f"kernels {', '.join(ours)}"] if ours else []
        who = f"{process_name()}{', strict' if self.is_strict else ''}"
        return f"bcg-fixes {__version__} on sglang {self.plan.version}, {who}: {'; '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "package": __version__,
            "sglang": self.plan.version,
            "pid": os.getpid(),
            "started": procfs.start_ticks(os.getpid()),
            "process": process_name(),
            **(self.served.as_dict() if self.served else dict.fromkeys(("model", "port", "rank", "ranks"))),
            "argv": sys.argv,
            "time": time.time(),
            "seconds": round(self.seconds, 3),
            "plan": self.plan.digest,
            "verified": self.read_back.as_dict() if self.read_back else None,
            "selfcheck": self.selfcheck,
            "canary": self.canary,
            "reached": call_counts.TALLY.as_dict(),
            "fixes": [self.row(each, outcome) for each, outcome in self.settled(self.plan.fixes)],
            "kernels": {
                choice.op: self.row(choice, outcome) | {"required": choice.required} | active.so_far(choice.op)
                for choice, outcome in self.settled(self.plan.kernels)
            },
        }

    def row(self, decision: Decision[Any], outcome: Outcome) -> dict[str, Any]:
        return outcome.as_dict() | {"concerns": self.concerns(decision)}


def rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every fix and kernel of a report that was read, with its id."""
    return [*content["fixes"], *({"id": op, **row} for op, row in content["kernels"].items())]


def process_name() -> str:
    return f"{multiprocessing.current_process().name} (pid {os.getpid()})"


def write(report: Report, folder: pathlib.Path, is_taken_along: bool = True) -> pathlib.Path:
    """Put this process's report where `status` finds it.

    Taken along, it is removed when the process ends in order; otherwise by the next process that starts.
    """
    make_private(folder)
    remove_stale(folder)
    file = folder / f"{os.getpid()}.json"
    if is_taken_along and not file.exists():
        atexit.register(remove_own, file, os.getpid())
    draft = file.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(report.as_dict(), indent=1))
        draft.replace(file)
    except OSError:
        # an earlier report says what may be true no longer
        file.unlink(missing_ok=True)
        raise
    return file


def make_private(folder: pathlib.Path) -> None:
    """Create the folder for this user alone; one that somebody else could have prepared is refused."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ReportError(
            f"{folder} is not a private folder of this user; remove it, or set SGLANG_BCG_REPORT_DIR to a folder of "
            f"your own with mode 700"
        )


def remove_own(file: pathlib.Path, pid: int) -> None:
    # a forked child inherits this call and must leave its parent's report alone
    if os.getpid() == pid:
        file.unlink(missing_ok=True)


def remove_stale(folder: pathlib.Path) -> None:
    for file, content in read_all(folder):
        if not is_live(content):
            file.unlink(missing_ok=True)


def is_live(content: dict[str, Any]) -> bool:
    if not content.keys() >= {"pid", "started"}:
        return False
    started = procfs.start_ticks(content["pid"])
    return started is not None and started == content["started"]


def read_all(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    """Every report; an empty one if a crash has left it broken.

    Root reads other users' folders, so anything but a regular file is skipped: reading a pipe would block.
    """
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text()) if stat.S_ISREG(file.lstat().st_mode) else {}
            yield file, content if isinstance(content, dict) else {}
        except FileNotFoundError:
            # its process ended while we were looking
            continue
        except ValueError:
            yield file, {}
