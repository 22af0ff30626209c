# SPDX-License-Identifier: Apache-2.0
"""The search for the fix that changes an answer: a command is run with ever smaller sets of fixes switched off."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import doctor
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import Registry
from sglang_bcg_fixes.source import releases

# of fixes that change an answer together; each costs a search of its own
MOST = 4
# a shell's words for a command that it cannot run
CANNOT_BE_RUN = (126, 127)


class BisectError(Exception):
    """No result, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The end of one run: two are equal if status and output are; no status where it did not end in time."""

    status: int | None
    output: bytes

    @property
    def says_nothing(self) -> bool:
        """Tell whether the same again would prove nothing: it was cut off, or only an exit status is known."""
        return self.status is None or not self.output

    def __str__(self) -> str:
        ending = "no end in time" if self.status is None else f"exit status {self.status}"
        if self.says_nothing and self.status is not None:
            return f"{ending}, no output"
        return f"{ending}, output {hashlib.sha256(self.output).hexdigest()[:8]} ({len(self.output)} bytes)"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command whose answer is its exit status and what it prints; everything is kept in a folder."""

    words: Sequence[str]
    folder: pathlib.Path
    limit: float

    def run(self, number: int, off: Sequence[str]) -> Answer:
        """Run it with these flags off; what it leaves running is ended with it."""
        output = self.folder / f"{number:02}.stdout"
        with output.open("wb") as out, output.with_suffix(".stderr").open("wb") as log:
            try:
                process = subprocess.Popen(
                    self.words,
                    env=flags.environment_with_off(off),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise BisectError(
                    f"{self.words[0]} cannot be run ({error.strerror}); name a program or a script"
                ) from error
            try:
                status = process.wait(self.limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status in CANNOT_BE_RUN:
            raise BisectError(f"its exit status {status} is a shell's for a command that it cannot run; see {log.name}")
        return Answer(status, output.read_bytes())


@dataclasses.dataclass
class Search:
    """Runs of one command, counted and told as they end."""

    run: Callable[[int, Sequence[str]], Answer]
    # by id; each is on unless it is switched off
    flags: dict[str, str]
    say: Callable[[str], None]
    count: int = 0
    all_on: Answer | None = None
    all_off: Answer | None = None
    # another one each time, so that only the answer with all of them on is known
    off_varies: bool = False
    known: dict[frozenset[str], bool] = dataclasses.field(default_factory=dict)

    def result(self) -> list[str]:
        """Find few that change the answer when they are off; none where it is the same without all of them."""
        everything = list(self.flags)
        self.all_on = self.answer("all on", [])
        if self.answer("all on, again", []) != self.all_on:
            raise BisectError(
                "the same command with the same fixes gives another answer, so a change proves nothing; ask one "
                "prompt at a time, with temperature 0 and --disable-radix-cache"
            )
        self.all_off = self.answer("all off", everything)
        if self.all_off == self.all_on:
            if self.all_on.says_nothing:
                raise BisectError(
                    f"nothing was answered, with all of them on and off alike: {self.all_on}; the command has to print "
                    f"an answer and to end within --limit seconds"
                )
            return []
        self.off_varies = self.answer("all off, again", everything) != self.all_off
        self.known = {frozenset[str](): False, frozenset(everything): True}
        found = needed(everything, self.is_changed)
        if not self.changes(f"off, again: {', '.join(found)}", found):
            raise BisectError(f"without {', '.join(found)} the answer is not the same each time; run it again")
        return found

    def is_changed(self, off: Sequence[str]) -> bool:
        key = frozenset(off)
        if key not in self.known:
            self.known[key] = self.changes(f"off: {', '.join(off) if len(off) <= MOST else len(off)}", off)
        return self.known[key]

    def changes(self, what: str, off: Sequence[str]) -> bool:
        """Tell whether the answer is that of all off, or where that varies, any other than that of all on."""
        found = self.answer(what, off)
        return found != self.all_on if self.off_varies else found == self.all_off

    def answer(self, what: str, off: Sequence[str]) -> Answer:
        self.count += 1
        found = self.run(self.count, [self.flags[name] for name in off])
        same = "as with all on" if found == self.all_on else "as with all off" if found == self.all_off else found
        self.say(f"run {self.count:2}  {what}: {same}")
        return found


def needed(names: Sequence[str], is_changed: Callable[[Sequence[str]], bool]) -> list[str]:
    """Few that together make a change, where all of them do and none does not.

    The shortest beginning of the list that makes the change ends with one that is needed. Then the search goes on for
    one before it, with those that were found, until they suffice: a logarithm of runs for each.
    """
    found: list[str] = []
    while not found or not is_changed(found):
        if len(found) == MOST:
            some = ", ".join(found)
            raise BisectError(
                f"more than {MOST} change it together, {some} among them, or it varies; name few: --among"
            )
        unchanged, changed = 0, len(names)
        while changed - unchanged > 1:
            middle = (unchanged + changed) // 2
            if is_changed([*names[:middle], *found]):
                changed = middle
            else:
                unchanged = middle
        found.append(names[unchanged])
        names = names[:unchanged]
    # one that needs another gives an answer of neither kind without it, so that both may have been taken along
    return next(([name] for name in found[1:] if is_changed([name])), found)


def command(
    known: Registry, words: Sequence[str], among: str | None, limit: float, folder: pathlib.Path | None
) -> bool:
    """Search with the SGLang that is installed here, and print each run and the result; False if none changes it."""
    source = releases.installed()
    if source is None:
        raise BisectError("no SGLang is installed here; run it in the environment of the server")
    on = candidates(plan.make(known, known.settings(), source), among)
    folder = empty_folder(folder)
    if problem := doctor.loading_problem():
        print(f"bcg-fixes bisect: warning: {problem}", file=sys.stderr)
    print(f"{len(on)} fixes and kernels are on; the output of each run is kept in {folder}", flush=True)
    search = Search(Command(words, folder, limit).run, on, lambda line: print(line, flush=True))
    found = search.result()
    if not found:
        print("no fix changes the answer: it is the same with all of them off")
        return False
    off = " ".join(f"{on[name]}=off" for name in found)
    alike = "varies, as with all of them off" if search.off_varies else "is as with all of them off"
    verb = "changes the answer" if len(found) == 1 else "change the answer together"
    print(f"{' and '.join(found)} {verb}: with {off} alone it {alike}")
    print("\n".join(f"`bcg-fixes explain {name}` says what it is for" for name in found))
    return True


def empty_folder(named: pathlib.Path | None) -> pathlib.Path:
    """The folder for the output of each run; one that holds an earlier search is left alone."""
    if named is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="bcg-fixes-bisect-"))
    try:
        named.mkdir(parents=True, exist_ok=True)
        earlier = any(named.glob("*.stdout"))
    except OSError as error:
        raise BisectError(f"--folder: {named} cannot take the runs ({error.strerror}); name another") from error
    if earlier:
        raise BisectError(f"--folder: {named} holds the runs of an earlier search; name another, or remove it")
    return named


def candidates(made: plan.Plan, among: str | None) -> dict[str, str]:
    """The flag of each fix and kernel that is on for this source, or of those that are named."""
    on = {decision.id: decision.subject.flag for decision in made.applied}
    if not on:
        raise BisectError("no fix and no kernel is on for this SGLang, with these flags; `bcg-fixes doctor` says why")
    named = list(on) if among is None else [name.strip().lower() for name in among.split(",")]
    for name in named:
        if name not in on:
            raise BisectError(f"--among: '{name}' is not on here{flags.nearest(name, on)}")
    return {name: on[name] for name in named}
