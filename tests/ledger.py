# SPDX-License-Identifier: Apache-2.0
"""Rows that were proved are not run again before something changes that they have read.

    python -m tests.ledger            `make test`: what is cheap, what is open, and a sample of what is recorded
    python -m tests.ledger --all      `make test-all`: everything that is open, into tests/recorded; may be interrupted

A row is a test file on a release. It is recorded only when every test in it has passed, with what its processes have
read (tests/traced.py), and it is open as soon as any of that has changed. tests/recorded/README.md has the rest.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence

import pytest

from tests import processes, proofs, traced, wheels
from tests.proofs import Proof, Tree

# rows of at most so many seconds are cheap; of the others a sample of so many is proved again
CHEAP, SAMPLE = 2.0, 600.0
# a row without a time is given so long, and one with a time this many times as long
LONGEST, PATIENCE = 1800.0, 6
# what is reckoned with where nothing is known, and the least that is allowed
UNKNOWN = 300.0
# which row of a release is not among what `make test` has always had
BETWEEN = "between the oldest and the newest release of its file"
# what so many of the last commits have touched is proved first
LATELY = 10
# no row starts later than this many minutes before the last one must have ended
SPARE = 7


@dataclasses.dataclass(eq=False)
class Row:
    """A test file on a release, or all of a file that starts none for each test."""

    file: str
    release: str
    tests: list[str]
    is_between: bool = False
    # as it was recorded last, whatever has changed since; and what proves it as it is now
    last: Proof | None = None
    proof: Proof | None = None

    @property
    def name(self) -> str:
        return f"{self.file} {self.release}".strip()

    @property
    def seconds(self) -> float:
        known = self.proof or self.last
        return known.seconds if known else 0.0


@dataclasses.dataclass
class Ended:
    """The end of a row that was run."""

    row: Row
    seconds: float
    outcomes: dict[str, str]
    told: dict[str, str]
    log: str
    notes: list[tuple[int, str, str]]
    # None where it was killed
    status: int | None

    @property
    def failed(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome == "failed"]

    @property
    def has_passed(self) -> bool:
        return self.status == 0 and bool(self.outcomes) and not self.failed


class Collected:
    """Pytest's plugin that keeps the rows of what is collected."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        from tests import conftest

        for item in session.items:
            file = item.path.relative_to(processes.REPOSITORY).as_posix()
            row = self.rows.setdefault((file, conftest.row_of(item)), Row(file, conftest.row_of(item), []))
            row.tests.append(item.nodeid)


def collect() -> list[Row]:
    """Every row there is, in the order of releases."""
    command = [sys.executable, "-m", "tests.ledger", "--collect"]
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder, "rows.json")
        done = subprocess.run([*command, str(listed)], capture_output=True, text=True, cwd=processes.REPOSITORY)
        if done.returncode or not listed.is_file():
            raise SystemExit(f"the tests cannot be collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        rows = [Row(**row) for row in json.loads(listed.read_text())]
    of_file: dict[str, list[Row]] = {}
    for row in rows:
        if row.release:
            of_file.setdefault(row.file, []).append(row)
    for several in of_file.values():
        several.sort(key=lambda row: wheels.RELEASES.index(row.release))
        for row in several[1:-1]:
            row.is_between = True
    return rows


def write_collected(listed: str) -> int:
    collected = Collected()
    status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[collected])
    rows = [dict(file=row.file, release=row.release, tests=row.tests) for row in collected.rows.values()]
    pathlib.Path(listed).write_text(json.dumps(rows))
    return int(status)


class Worker:
    """A process of tests/rows.py; begun anew when what it has imported may have changed, or a row had to be killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="row-")
        self.state = 0

    def run(self, row: Row, state: int, only: Sequence[str] = (), patience: int = 1, limit: float = LONGEST) -> Ended:
        if self.process is None or self.process.poll() is not None or self.state != state:
            self.end()
            self.start()
            self.state = state
        process = self.process
        assert process and process.stdin and process.stdout
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder.name))
        result, log = folder / "result.json", folder / "log"
        expected = row.seconds * PATIENCE or LONGEST
        asked = {
            "file": row.file,
            "release": row.release,
            "only": list(only),
            "folder": str(folder),
            "result": str(result),
            "log": str(log),
            "patience": patience,
            "seconds": min(max(UNKNOWN, min(expected, LONGEST)) * patience, limit),
        }
        started = time.monotonic()
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        seconds = time.monotonic() - started
        status = json.loads(answer) if answer else None
        if status is None:
            # what it had started may still run, and hold the process that forks
            self.end()
        found = json.loads(result.read_text()) if result.is_file() else {"outcomes": {}, "told": {}}
        said = log.read_text(errors="replace") if log.is_file() else ""
        ended = Ended(row, seconds, found["outcomes"], found["told"], said, proofs.notes_in(folder), status)
        shutil.rmtree(folder, ignore_errors=True)
        return ended

    def start(self) -> None:
        notes = pathlib.Path(self.folder.name, "worker")
        notes.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name.startswith(proofs.VARIABLES)}
        environment = {
            **kept,
            traced.FOLDER: str(notes),
            traced.CODE: str(pathlib.Path(traced.__file__)),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rows"],
            env=environment,
            cwd=processes.REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> None:
        if self.process:
            # with the processes that it has started and that have not left its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


class Run:
    """All rows of one call, on all workers."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = float(os.environ.get("STARTED", time.time()))
        self.minutes = float(os.environ.get("MINUTES") or 0)
        self.step = float(os.environ.get("STEP") or 0)
        self.tree = Tree()
        self.lock = threading.Lock()
        self.state = 0
        self.signature = self.tree.refreshed()
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[Ended] = []
        self.doubtful: list[Ended] = []
        self.left: list[Row] = []
        self.done = 0
        self.total = 0
        self.again: list[Row] = []
        self.always: list[Row] = []
        self.rows: list[Row] = []

    def choose(self, rows: list[Row]) -> list[Row]:
        """Choose of what is recorded: all that is cheap or that nobody can judge, and a sample."""
        self.always = [row for row in rows if row.seconds <= CHEAP or (row.proof and row.proof.unseen)]
        self.again = sample([row for row in rows if row not in self.always], SAMPLE)
        chosen = [*self.always, *self.again]
        return chosen + [row for row in rows if row.proof and row.proof.skipped and row not in chosen]

    def elapsed(self) -> float:
        return time.time() - self.began

    def may_start(self, row: Row) -> bool:
        if self.step and self.elapsed() > self.step:
            return False
        if not self.minutes:
            return True
        return self.elapsed() < self.minutes * 60 and (row.seconds or UNKNOWN) < self.left_over()

    def left_over(self) -> float:
        """The seconds until every row must have ended."""
        return (self.minutes + SPARE) * 60 - self.elapsed() if self.minutes else LONGEST

    def run_all(self, rows: list[Row]) -> None:
        """Run them in parallel: one worker begins with the first releases and one with the last."""
        order = {release: place for place, release in enumerate(("", *wheels.RELEASES))}
        rows = sorted(rows, key=lambda row: (order[row.release], -row.seconds, row.file))
        first = self.foremost(rows)
        waiting = [collections.deque(first), collections.deque(row for row in rows if row not in first)]

        def work(number: int) -> None:
            worker = Worker()
            try:
                while True:
                    with self.lock:
                        left = next(filter(None, waiting), None)
                        if left is None:
                            return
                        row = left.popleft() if number % 2 == 0 else left.pop()
                        if not self.may_start(row):
                            self.left.append(row)
                            continue
                        state, before = self.now()
                    ended = worker.run(row, state, self.only(row), limit=self.left_over())
                    with self.lock:
                        self.take(ended, before)
            finally:
                worker.end()

        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            try:
                for _ in pool.map(work, range(self.options.jobs)):
                    pass
            except BaseException:
                # interrupted, or broken: no other row begins
                with self.lock:
                    for left in waiting:
                        left.clear()
                raise

    def foremost(self, rows: list[Row]) -> list[Row]:
        """Choose those that rest on a file that the last commits have touched; one that most rest on orders nothing."""
        names = touched_lately(processes.REPOSITORY)
        touched = {row: names.intersection(self.inputs(row)) for row in rows}
        number = collections.Counter(name for some in touched.values() for name in some)
        return [row for row in rows if any(number[name] * 2 <= len(rows) for name in touched[row])]

    def inputs(self, row: Row) -> set[str]:
        """The files that the row rests on, as far as its last proof tells."""
        return {row.file, *(proofs.inputs(self.tree, row.file, row.last) if row.last else ())}

    def only(self, row: Row) -> Sequence[str]:
        """The tests of a recorded row that nothing is known of, where the others are not to be run."""
        return row.proof.skipped if row.proof and row not in self.again and row not in self.always else ()

    def now(self) -> tuple[int, proofs.Signature]:
        """Number the state of the files: a process that has imported them serves no later state."""
        signature = self.tree.refreshed()
        if signature != self.signature:
            self.signature, self.state = signature, self.state + 1
        return self.state, signature

    def take(self, ended: Ended, before: proofs.Signature) -> None:
        row = ended.row
        self.done += 1
        counts = collections.Counter(ended.outcomes.values())
        self.counts.update(counts)
        words = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) or "nothing reported"
        fate = "" if ended.has_passed else "  FAILED"
        print(f"[{self.done:3}/{self.total}] {ended.seconds:6.1f}s  {row.name}: {words}{fate}", flush=True)
        if not ended.has_passed:
            if not ended.outcomes:
                self.counts["failed"] += 1
            if row.proof:
                # tried once more, when it is alone
                self.doubtful.append(ended)
                proofs.doubt(row.proof.key)
            else:
                self.failures.append(ended)
                show(ended)
            return
        if self.only(row):
            return
        try:
            proof = proofs.proof_of(self.tree, row.file, row.release, row.tests, ended, before)
        except proofs.Unproved as reason:
            print(f"          not recorded: {reason}", flush=True)
            row.proof = None
            self.left.append(row)
            return
        row.proof = proof
        if self.options.first_failure:
            return
        proofs.remember(row.file, row.release, proof)
        if self.options.all:
            proofs.write(row.file, {row.release: proof})

    def once_more(self) -> None:
        """A recorded row that fails has a second try alone, with time: a machine may be too busy for once."""
        worker = Worker()
        for ended in self.doubtful:
            if not self.may_start(ended.row):
                self.failures.append(ended)
                show(ended)
                continue
            second = worker.run(ended.row, self.state, patience=3, limit=self.left_over())
            self.counts["failed"] -= len(ended.failed) or 1
            self.counts.update(second.outcomes.values())
            if second.has_passed:
                print(f"{ended.row.name}: failed beside others, passed alone; it is open now", flush=True)
                show(ended)
                continue
            self.failures.append(second)
            show(second)
            beside = [row.name for row in self.rows if row is not ended.row and share(row, ended.row)]
            print(f"it shares its inputs with {', '.join(beside) or 'no other row'}", flush=True)
        worker.end()


def share(row: Row, other: Row) -> bool:
    return bool(row.proof and other.proof and row.proof.reads == other.proof.reads)


def show(ended: Ended) -> None:
    print(f"\n{'_' * 10} {ended.row.name} {'_' * 10}", flush=True)
    for name, text in ended.told.items():
        if ended.outcomes.get(name) == "failed":
            print(f"{name}\n{text}\n", flush=True)
    if not ended.told or ended.status is None:
        how = "was ended after its time" if ended.status is None else f"ended with {ended.status}"
        print(f"it {how}; the end of its log:\n{ended.log[-6000:]}\n", flush=True)


def sample(rows: Iterable[Row], seconds: float) -> list[Row]:
    """Choose recorded rows by the last commit, so that nobody knows before which ones they will be."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=processes.REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    drawn = sorted(rows, key=lambda row: row.name)
    random.Random(head).shuffle(drawn)
    chosen: list[Row] = []
    for row in drawn:
        if sum(each.seconds for each in chosen) + row.seconds <= seconds:
            chosen.append(row)
    return chosen


def touched_lately(folder: pathlib.Path, commits: int = LATELY) -> set[str]:
    """The files of the last commits; none where git knows nothing of this folder."""
    command = ["git", "log", f"--max-count={commits}", "--format=", "--name-only", "-z"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return set(filter(None, told.split("\0")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="everything that is open, into tests/recorded")
    parser.add_argument("--cold", action="store_true", help="believe nothing that is recorded")
    parser.add_argument("--list", action="store_true", help="say what is open, and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="rows at once; one for each core")
    parser.add_argument("--shard", metavar="K/N", default="1/1", help="every N-th row of a cold run, from the K-th on")
    parser.add_argument("--first-failure", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--about", metavar="WORD", help=argparse.SUPPRESS)
    parser.add_argument("--near", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--collect", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help="rows of these files or folders only")
    options = parser.parse_args()
    if options.collect:
        return write_collected(options.collect)
    traced.install()
    run = Run(options)
    rows = known(run)
    still_open = [row for row in rows if not row.proof]
    if options.first_failure:
        return first_failure(run, still_open)
    if options.list:
        for row in still_open:
            print(row.name)
        print(f"{len(still_open)} of {len(rows)} rows are open" + "; run `make test-all`" * bool(still_open))
        return int(bool(still_open))
    lint = None if options.all or options.paths else start_lint()
    if options.all:
        for row in rows:
            if row.proof and row.proof is not row.last:
                proofs.write(row.file, {row.release: row.proof})
        chosen: list[Row] = []
    elif not run.minutes and not any(proofs.is_known_here(row.file, row.release, row.last) for row in rows):
        words = f"Nothing is recorded for this Python ({wheels.PYTHON}) and these packages"
        print(f"{words}: {len(rows)} rows are not proved here; `make test-all` proves them.", flush=True)
        still_open, chosen = [], run.choose(rows)
    else:
        chosen = run.choose([row for row in rows if row.proof])
    run.rows = rows
    run.total = len(still_open) + len(chosen)
    # first what is open: most of it is what the last commits have changed
    run.run_all([row for row in still_open if not row.is_between])
    run.run_all(chosen)
    # CI is red for any of those, and only prints these
    run.run_all([row for row in still_open if row.is_between])
    run.once_more()
    return close(run, rows, still_open, lint)


def known(run: Run) -> list[Row]:
    """The rows that were asked for, each with its proof if it has one."""
    options = run.options
    rows = collect()
    if options.paths:
        rows = [row for row in rows if row.file.startswith(tuple(options.paths))]
    else:
        for problem in proofs.problems({row.file for row in rows}):
            print(problem, flush=True)
    used = {row.release for row in rows} - {""} if options.paths else wheels.RELEASES
    broken = wheels.unlike_their_wheels(used)
    if broken:
        raise SystemExit("\n".join(broken))
    shard, shards = map(int, options.shard.split("/"))
    rows = rows[shard - 1 :: shards]
    recorded = {file: proofs.last(file) for file in {row.file for row in rows}}
    for row in rows:
        row.last = recorded[row.file].get(row.release)
        if not options.cold:
            row.proof = proofs.find(run.tree, row.file, row.release, row.tests, row.last)
    return rows


def first_failure(run: Run, rows: list[Row]) -> int:
    """Run what is open until something fails, what names the mistake's place first; see tests/mutants.py."""
    about = re.compile(rf"(?<![a-z]){re.escape(run.options.about)}(?![a-z])")
    texts = {file: (processes.REPOSITORY / file).read_text() for file in {row.file for row in rows}}
    # what rests on git or on the records cannot pass in a copy
    judges = [row for row in rows if not (row.last and row.last.unseen)]
    near = [row for row in judges if about.search(texts[row.file]) or about.search(row.file)]
    first = sorted(near if run.options.near else judges, key=lambda row: (not about.search(row.file), row not in near))
    for start in range(0, len(first), 2 * run.options.jobs):
        run.run_all(first[start : start + 2 * run.options.jobs])
        if run.failures:
            break
    noticed = run.failures[0].row.name if run.failures else ""
    told = {"open": len(judges), "run": run.done, "noticed by": noticed}
    pathlib.Path(run.options.first_failure).write_text(json.dumps(told))
    return 0


def start_lint() -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["make", "--no-print-directory", "lint"],
        cwd=processes.REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def close(run: Run, rows: list[Row], were_open: list[Row], lint: subprocess.Popen[str] | None) -> int:
    """Say what is proved and what is not, and whether that is as it should be."""
    is_clean = True
    if lint:
        said, _ = lint.communicate()
        is_clean = lint.returncode == 0
        print("lint passed" if is_clean else f"lint failed:\n{said}", flush=True)
    left = [row for row in rows if row in run.left and (not row.proof or row.proof.unseen)]
    debt = [row for row in left if row.is_between]
    red = [row for row in left if not row.is_between]
    for words, some in (("still open", red), (f"still open ({BETWEEN})", debt)):
        if some:
            print(f"{len(some)} rows are {words}: {', '.join(row.name for row in some[:5])} ...; run `make test-all`")
    if run.failures:
        print("failed: " + "; ".join(ended.row.name for ended in run.failures))
    ran = run.done
    print(
        f"{ran} rows were run, {len([row for row in were_open if row.proof])} of them new and {len(run.again)} drawn "
        f"from the recorded; {len(left)} of {len(rows)} are open"
    )
    counts = run.counts
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return int(bool(run.failures or (red and not run.step) or not is_clean or (not ran and not run.options.all)))


if __name__ == "__main__":
    raise SystemExit(main())
