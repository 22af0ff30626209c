# SPDX-License-Identifier: Apache-2.0
"""Run servers in process groups, with time limits; a hang or a crash is a result too."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import instruments
from sglang_bcg_fixes.process import report

FINISHED, INTERRUPTED = "finished", "interrupted"
TAIL_LINES, ERROR_LINES = 15, 6
ERROR = re.compile(r"^\S*(Error|Exception)\b|illegal memory access|bcg-fixes refuses", re.MULTILINE)
# pip's package folders
INSTALLED = re.compile(r"/[^\s\"':]*/(?:site|dist)-packages/")
# the first server on a machine compiles kernels; a call takes a fraction of a second
START_LIMIT, SILENCE_LIMIT = 300, 90
SECONDS_BETWEEN_LOOKS = 0.2
# below the ephemeral port range
PORTS = range(20000, 32000)


@dataclasses.dataclass(frozen=True)
class Server:
    """A server to start: lab.verify.server reads `job`, and `environment` is added to ours."""

    name: str
    folder: pathlib.Path
    job: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def answers(self) -> pathlib.Path:
        return self.folder / "answers"

    @property
    def reports(self) -> pathlib.Path:
        return self.folder / "reports"

    @property
    def log(self) -> pathlib.Path:
        return self.folder / "log"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a server: `ending` is FINISHED or says in words what happened instead."""

    ending: str
    seconds: float
    start_seconds: float | None
    calls: list[dict[str, Any]]
    passes: list[list[Any]]
    applied: list[str]
    tail: list[str]
    selfcheck: dict[str, Any] | None = None
    # our kernels, and the implementation of each
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    # fixes whose code no process of this server has imported
    waiting: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.ending == FINISHED

    @property
    def interrupted(self) -> bool:
        return self.ending.startswith(INTERRUPTED)

    @property
    def error(self) -> str | None:
        """Last error in its log, if it did not finish."""
        said = [line for line in self.tail if re.match(r"\w*(Error|Exception)\b", line)]
        return said[-1] if said and not self.finished else None

    @property
    def answers(self) -> list[list[dict[str, Any]]]:
        return [call["answers"] for call in self.calls]


NEVER_STARTED = Outcome(f"{INTERRUPTED} before it was started", 0, None, [], [], [], [])


class Runner:
    """Run servers, `jobs` at a time; the end of the `with` block kills those still running."""

    def __init__(self, command: Sequence[str], jobs: int, limits: tuple[float, float] = (START_LIMIT, SILENCE_LIMIT)):
        self.command = list(command)
        self.start_limit, self.silence_limit = limits
        self.pool = concurrent.futures.ThreadPoolExecutor(jobs)
        self.over = threading.Event()
        self.ports = itertools.cycle(random.sample(PORTS, len(PORTS)))
        self.lock = threading.Lock()
        self.running: dict[str, float] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.pool.shutdown(cancel_futures=True)

    def start(self, server: Server) -> concurrent.futures.Future[Outcome]:
        return self.pool.submit(self.run, server)

    def run(self, server: Server) -> Outcome:
        began = time.monotonic()
        server.reports.mkdir(parents=True, mode=0o700)
        engine = {**server.job["engine"], "port": self.free_port(), "nccl_port": self.free_port()}
        job = server.folder / "job.json"
        job.write_text(json.dumps({**server.job, "engine": engine, "answers": str(server.answers)}))
        self.running[server.name] = began
        with server.log.open("wb") as log:
            process = subprocess.Popen(
                [*self.command, str(job)],
                env=environment_of(server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # its own group, to be killed with everything that it starts
                start_new_session=True,
            )
            try:
                ending = self.wait(process, server)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.running.pop(server.name, None)
        return outcome(server, ending, time.monotonic() - began)

    def wait(self, process: subprocess.Popen[bytes], server: Server) -> str:
        """Wait until it has answered everything, has ended, or has made no progress for too long."""
        size, since = 0, time.monotonic()
        while not self.over.wait(SECONDS_BETWEEN_LOOKS):
            status = process.poll()
            if server.answers.exists() and server.answers.stat().st_size != size:
                size, since = server.answers.stat().st_size, time.monotonic()
                if lines_in(server.answers)[-1:] == [{FINISHED: True}]:
                    return FINISHED
            if status is not None:
                how = f"ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
                return f"{how} {'while it served' if size else 'before it served'}"
            limit = self.silence_limit if size else self.start_limit
            if time.monotonic() - since > limit:
                return f"hung: no {'answer' if size else 'start'} within {limit:.0f} s, killed"
        return INTERRUPTED

    def free_port(self) -> int:
        with self.lock:
            return next(port for port in self.ports if is_free(port))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def environment_of(server: Server) -> dict[str, str]:
    """Build a server's environment from its arm, whatever is set here."""
    return {**flags.environment_without_ours(), **server.environment, flags.REPORT_DIR: str(server.reports)}


def outcome(server: Server, ending: str, seconds: float) -> Outcome:
    lines = lines_in(server.answers)
    reports = [json.loads(file.read_text()) for file in sorted(server.reports.glob("*.json"))]
    states = collections.defaultdict(set)
    for content in reports:
        for row in report.rows(content):
            states[row["id"]].add(row["state"])
    # lost in one process is lost, though others of this server have it
    applied = {name for name, seen in states.items() if report.APPLIED in seen and not seen & {*report.MISSING}}
    kernels = {op: kernel["impl"] for content in reports for op, kernel in content["kernels"].items() if op in applied}
    text = without_places(server.log.read_text(errors="replace"), server.folder)
    return Outcome(
        ending=ending,
        seconds=round(seconds, 1),
        start_seconds=lines[0]["started"] if lines else None,
        calls=[line for line in lines if "answers" in line],
        passes=[line for file in sorted(server.reports.glob(f"*{instruments.SUFFIX}")) for line in lines_in(file)],
        applied=sorted(applied - kernels.keys() - set(instruments.every_instrument())),
        tail=tail_of(text.splitlines()),
        selfcheck=next((found for content in reports if (found := content.get("selfcheck"))), None),
        kernels=kernels,
        waiting=tuple(sorted(name for name, seen in states.items() if seen == {report.PENDING})),
    )


def tail_of(lines: list[str]) -> list[str]:
    """Last errors and last lines of a log: a dying SGLang buries its error under threads' stacks."""
    errors = list(dict.fromkeys(line for line in lines if ERROR.search(line)))[-ERROR_LINES:]
    return [line[:300] for line in (*errors, *lines[-TAIL_LINES:])]


def without_places(text: str, folder: pathlib.Path) -> str:
    """Strip this machine's paths from a log line, which goes into files that others read."""
    # keep the case and the arm
    text = text.replace(f"{folder.parents[1]}/", "")
    entries = [entry.rstrip("/") for entry in sys.path if os.path.isabs(entry)]
    # folders may be nested, and the root folder identifies nothing
    for entry in sorted(filter(None, entries), key=len, reverse=True):
        text = text.replace(f"{entry}/", "")
    return INSTALLED.sub("", text).replace(os.path.expanduser("~"), "~")


def lines_in(file: pathlib.Path) -> list[Any]:
    """Complete lines of a JSON lines file, whose writer may have been killed in the middle of one."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Progress:
    """Progress: one updating line on a terminal, elsewhere a line for each server that is done."""

    def __init__(self, runner: Runner, servers: int, seconds: float) -> None:
        self.runner, self.servers, self.seconds = runner, servers, seconds
        self.began = time.monotonic()
        self.in_place = sys.stderr.isatty()

    def follow(
        self, futures: Mapping[concurrent.futures.Future[Outcome], Server], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for all; `ended` is called whenever some more have ended."""
        left = set(futures)
        while left:
            done, left = concurrent.futures.wait(left, timeout=1, return_when=concurrent.futures.FIRST_COMPLETED)
            finished = self.servers - len(left)
            for future in done:
                result = future.result()
                self.say(f"[{finished}/{self.servers}] {futures[future].name}: {result.ending}, {result.seconds:.0f} s")
            if done:
                ended()
            if self.in_place:
                print(f"\r{self.bar(finished)}\033[K", end="", file=sys.stderr, flush=True)
        if self.in_place:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def bar(self, finished: int) -> str:
        spent = time.monotonic() - self.began
        total = spent / finished * self.servers if finished >= self.servers / 4 else max(self.seconds, spent)
        filled = round(20 * finished / self.servers)
        running = ", ".join(list(self.runner.running))
        left = f"{spent:.0f} s, about {total - spent:.0f} s left"
        return f"[{'#' * filled}{'.' * (20 - filled)}] {finished}/{self.servers}, {left}: {running}"[:150]

    def say(self, line: str) -> None:
        print(f"\r{line}\033[K" if self.in_place else line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the servers are stopped too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
