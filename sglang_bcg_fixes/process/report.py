"""What was planned and what came of it: one log line, a table, and a file per process for `bcg-fixes status`."""

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
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes import __version__
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.model import Action, Choice, Decision, Fix, Kernel
from sglang_bcg_fixes.planning.plan import Plan
from sglang_bcg_fixes.process import procfs
from sglang_bcg_fixes.process.watch import ReadBack

APPLIED = "applied"
FAILED = "failed"
LOST = "lost"
WAITING = "waiting"
# states in which a fix that is wanted is not there
MISSING = (FAILED, LOST, Action.UNKNOWN.value, Action.BLOCKED.value)
# the states that the log line always names, and those that it names when there is something to say
ALWAYS = (APPLIED, Action.NOT_NEEDED.value, Action.OFF.value, Action.UNKNOWN.value)
SOMETIMES = (WAITING, FAILED, LOST, Action.BLOCKED.value)


class ReportError(Exception):
    """The folder of the reports cannot be trusted or written."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one decision in this process, read back where something was changed."""

    decision: Decision
    state: str
    detail: str

    @property
    def patched(self) -> Fix:
        return self.decision.fix

    def is_needed(self, strict: bool) -> bool:
        """Whether the process ends where it is not there."""
        return strict or self.decision.required

    def as_dict(self) -> dict[str, Any]:
        return {**self.decision.as_dict(), "state": self.state, "detail": self.detail}


@dataclasses.dataclass(frozen=True)
class KernelOutcome:
    """What became of one operation in this process."""

    choice: Choice
    state: str
    detail: str

    @property
    def patched(self) -> Kernel:
        return self.choice.kernel

    @property
    def said(self) -> str:
        """The form and what became of it, and whether a GPU has seen it on such a source."""
        return f"{self.choice.name} ({self.state}{'' if self.choice.proven else ', unproven on this release'})"

    def is_needed(self, strict: bool) -> bool:
        """SGLang's own code is right, so only what was named is."""
        return self.choice.required

    def as_dict(self) -> dict[str, Any]:
        return {**self.choice.as_dict(), "state": self.state, "detail": self.detail}


@dataclasses.dataclass
class Report:
    """Everything about the plugin in one process; outcomes change when a waiting fix is applied."""

    plan: Plan
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    kernels: dict[str, KernelOutcome] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    read_back: ReadBack | None = None
    selfcheck: dict[str, Any] | None = None
    canary: dict[str, int] | None = None

    @property
    def every(self) -> dict[str, Outcome | KernelOutcome]:
        return {**self.outcomes, **self.kernels}

    def note(self, name: str, state: str, problem: str | None) -> None:
        """What has become of a fix or kernel since; without a problem it is there for the planned reason."""
        outcome = self.every[name]
        if isinstance(outcome, Outcome):
            self.outcomes[name] = dataclasses.replace(outcome, state=state, detail=problem or outcome.decision.reason)
        else:
            detail = problem or outcome.choice.finding.reason
            self.kernels[name] = dataclasses.replace(outcome, state=state, detail=detail)

    def state(self, name: str) -> str:
        return self.every[name].state

    def states(self) -> dict[str, str]:
        found = {name: outcome.state for name, outcome in self.every.items()}
        return {**found, "selfcheck": self.selfcheck["verdict"]} if self.selfcheck else found

    def ids(self, state: str) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome.state == state]

    def line(self) -> str:
        """The line that every process logs, and logs again when a waiting fix has been applied."""
        states = [*ALWAYS, *(state for state in SOMETIMES if self.ids(state))]
        parts = [f"{state} {', '.join(self.ids(state)) or 'none'}" for state in states]
        ours = [f"{op} {each.said}" for op, each in self.kernels.items() if each.choice.impl]
        parts += [f"kernels {', '.join(ours)}"] if ours else []
        return f"bcg-fixes {__version__} on sglang {self.plan.version}, {process_name()}: {'; '.join(parts)}"

    def table(self) -> str:
        lines = [f"{name:32} {outcome.state:11} {outcome.detail}" for name, outcome in self.every.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "package": __version__,
            "sglang": self.plan.version,
            "pid": os.getpid(),
            "started": procfs.start_ticks(os.getpid()),
            "process": process_name(),
            "argv": sys.argv,
            "time": time.time(),
            "seconds": round(self.seconds, 3),
            "plan": self.plan.digest,
            "read_back": self.read_back.as_dict() if self.read_back else None,
            "selfcheck": self.selfcheck,
            "canary": self.canary,
            "reached": call_counts.TALLY.as_dict(),
            "fixes": [outcome.as_dict() for outcome in self.outcomes.values()],
            "kernels": {op: outcome.as_dict() for op, outcome in self.kernels.items()},
        }


def process_name() -> str:
    return f"{multiprocessing.current_process().name} (pid {os.getpid()})"


def write(report: Report, folder: pathlib.Path, is_taken_along: bool = True) -> pathlib.Path:
    """Put this process's report where `status` finds it.

    Taken along, it is gone when the process ends in order; left, it is removed by the next process that starts.
    """
    make_private(folder)
    remove_stale(folder)
    file = folder / f"{os.getpid()}.json"
    if is_taken_along and not file.exists():
        atexit.register(remove_own, file, os.getpid())
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(report.as_dict(), indent=1))
    draft.replace(file)
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
    """Every report; an empty one where a machine or a disk has failed in the middle of it.

    Root reads the folders of others, so that what is no file is passed over: nobody writes to a pipe that waits there.
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
