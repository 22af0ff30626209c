# SPDX-License-Identifier: Apache-2.0
"""Other processes as the kernel shows them in /proc: nothing runs in the server for it."""

from __future__ import annotations

import pathlib

TITLE = "sglang::"
# /proc may be mounted so that it hides other users' processes
GONE_OR_HIDDEN = (FileNotFoundError, ProcessLookupError, PermissionError)


def fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None if the process is gone, or hidden."""
    try:
        # the name in parentheses may contain anything, so count the fields behind it
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except GONE_OR_HIDDEN:
        return None


def every() -> list[int]:
    """The number of each process that is there now."""
    return sorted(int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdecimal())


def user(pid: int) -> int | None:
    try:
        return pathlib.Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return None


def environ(pid: int) -> dict[str, str] | None:
    """The environment a process started with; None if it is gone or another user's."""
    try:
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
    except GONE_OR_HIDDEN:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def start_ticks(pid: int) -> str | None:
    """The start of a process in kernel ticks, which differs for a later one with the same pid.

    None where it has ended, even if nobody has waited for it: in a container often nobody does.
    """
    found = fields(pid)
    return found[19] if found and found[0] not in "ZX" else None


def parent(pid: int) -> int:
    """0 where there is none."""
    found = fields(pid)
    return int(found[1]) if found else 0


def title(pid: int) -> str | None:
    """The title that SGLang gave a process, such as scheduler_TP0."""
    try:
        text = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    except GONE_OR_HIDDEN:
        return None
    return text.removeprefix(TITLE) if text.startswith(TITLE) else None
