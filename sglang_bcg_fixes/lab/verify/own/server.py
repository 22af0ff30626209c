# SPDX-License-Identifier: Apache-2.0
"""A user's server: started in a process group, awaited with a time limit, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping

from sglang_bcg_fixes.lab.verify import servers
from sglang_bcg_fixes.lab.verify.own import ask
from sglang_bcg_fixes.lab.verify.own.arms import Launch

SECONDS_TO_END = 20
SECONDS_BETWEEN_LOOKS = 0.2
LONGEST_LINE = 300


class ServerError(Exception):
    """The server cannot be started at all, and what to do."""


class Ended(Exception):
    """The server of an arm ended, or never answered; a result of that arm."""


def is_in_use(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((host, port)) == 0


@contextlib.contextmanager
def started(launch: Launch, environment: Mapping[str, str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    if is_in_use(launch.host, launch.port):
        raise ServerError(
            f"port {launch.port} of {launch.host} is in use, so another server would answer; stop it, or give the "
            f"command another --port"
        )
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                launch.words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # its own group, to be ended with everything that it starts
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{launch.words[0]} cannot be run ({error.strerror}); name the program of it") from error
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the group politely, then not: a second Ctrl-C must not leave one behind."""
    try:
        send(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    finally:
        send(process, signal.SIGKILL)
        process.wait()
        # what it left behind holds the port and the GPU's memory until the kernel has ended it
        deadline = time.monotonic() + SECONDS_TO_END
        while is_running(process.pid) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def is_running(group: int) -> bool:
    """Tell whether the group has a process; one that has ended and was not awaited does not count."""
    return any(is_of(int(folder.name), group) for folder in pathlib.Path("/proc").glob("[0-9]*"))


def is_of(process: int, group: int) -> bool:
    try:
        # the name in parentheses may contain anything
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # it ended in the meantime
        return False
    state, _, its_group = text.rpartition(")")[2].split()[:3]
    return int(its_group) == group and state not in "ZX"


def wait(process: subprocess.Popen[bytes], client: ask.Client, log: pathlib.Path, limit: float) -> float:
    """Seconds until it answers /health."""
    began = time.monotonic()
    while not client.is_healthy():
        if process.poll() is not None:
            raise Ended(how_it_ended(process, log))
        if time.monotonic() - began > limit:
            raise Ended(f"no answer to /health within {limit:.0f} s; {end_of(log)}")
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return time.monotonic() - began


def how_it_ended(process: subprocess.Popen[bytes], log: pathlib.Path) -> str:
    """Its exit status, if it ends soon after a request that it did not answer."""
    try:
        status = process.wait(2)
    except subprocess.TimeoutExpired:
        return f"it runs and does not answer; {end_of(log)}"
    how = f"ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return f"{how}; {end_of(log)}"


def end_of(log: pathlib.Path) -> str:
    """Its last error; SGLang writes of its own end below that."""
    said = [line.strip() for line in log.read_text(errors="replace").split("\n") if line.strip()]
    errors = [line for line in said if servers.ERROR.search(line)]
    return f"its log says: {(errors or said)[-1][:LONGEST_LINE]}" if said else "its log is empty"
