# SPDX-License-Identifier: Apache-2.0
"""Start programs in process groups of their own, wait for them with a time limit, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TAIL_LINES = 25
SECONDS_TO_END = 15
SECONDS_BETWEEN_LINES = 10


class ServeError(Exception):
    """Serving failed; the message says what, where and what to do next."""


def run(name: str, program: Callable[[Mapping[str, str]], int]) -> int:
    """Run a command of the Makefile and return its exit status."""
    # lets `kill` or a time limit on this program end what it has started too
    signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        return program(os.environ)
    except ServeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class Group:
    """A program and all that it starts."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path):
        self.log = log
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                # what it prints and what its errors say stand in the log as they came
                env={**environment, "PYTHONUNBUFFERED": "1"},
                # its own group, to be ended together with everything it spawned
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def stop(self) -> None:
        """End the whole process group: politely, then not."""
        for way in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, way)
            if self.is_gone_within(SECONDS_TO_END):
                break
        self.process.wait()

    def is_gone_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if not is_running(self.process.pid):
                return True
            time.sleep(0.1)
        return False


class Server(Group):
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: pathlib.Path, address: str):
        super().__init__(command, environment, folder / "server.log")
        self.address = address

    def failure(self, what: str) -> ServeError:
        tail = "\n".join(f"  | {line}" for line in self.lines()[-TAIL_LINES:])
        return ServeError(
            f"{what}. The end of its log, {self.log}:\n{tail}\n"
            f"Next: read that log from its first traceback on; SGLANG_PLUGINS=__none__ make serve tells whether it is "
            f"the plugin (then the missing plugin line is the only failure left)."
        )

    def check_alive(self) -> None:
        status = self.process.poll()
        if status is not None:
            ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            raise self.failure(f"the server {ended}")

    def wait_until_healthy(self, limit_s: float) -> float:
        started = time.monotonic()
        progress = Progress()
        try:
            while not self.is_healthy():
                self.check_alive()
                waited = time.monotonic() - started
                if waited > limit_s:
                    raise self.failure(f"the server did not answer {self.address}/health within {limit_s:.0f} s")
                progress.show(f"waiting for the server: {waited:.0f} s of at most {limit_s:.0f} s")
                time.sleep(0.5)
        finally:
            progress.end()
        return time.monotonic() - started

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            # not listening yet, or listening and not ready
            return False

    def generate(self, input_ids: Sequence[int], new_tokens: int, limit_s: float) -> list[int]:
        """Token ids of a greedy completion."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        question = json.dumps({"input_ids": list(input_ids), "sampling_params": sampling}).encode()
        request = urllib.request.Request(
            f"{self.address}/generate", data=question, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise self.failure(f"/generate answered with HTTP status {error.code}: {said}") from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise self.failure(f"/generate did not answer within {limit_s:.0f} s ({error})") from error
        output_ids = answer.get("output_ids")
        if not isinstance(output_ids, list) or len(output_ids) != new_tokens:
            raise self.failure(f"/generate answered without the {new_tokens} output ids asked for: {answer}")
        return output_ids


def is_running(group: int) -> bool:
    """Check for a running process in the group; zombies do not count."""
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # the name in parentheses may contain anything, so count the fields after it
            state, _parent, its_group = file.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            # it ended in the meantime
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


class Progress:
    """Progress: one updating line on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self.in_place = sys.stdout.isatty()
        self.next_line = 0.0

    def show(self, text: str) -> None:
        if self.in_place:
            print(f"\r{text}\033[K", end="", flush=True)
        elif time.monotonic() >= self.next_line:
            print(text, flush=True)
            self.next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def end(self) -> None:
        if self.in_place:
            print(flush=True)
