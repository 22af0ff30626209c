# SPDX-License-Identifier: Apache-2.0
"""Every folder that a server of this machine may report in, by its own environment."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.process import procfs, report

NAME = "sglang-bcg-fixes"
# what `status` shows of each; anybody can put a file into a folder of his own, and root reads that
SHOWN = {"process", "sglang", "plan", "fixes", "kernels"}
OF_ROW = {"state", "detail"}


def chosen() -> list[pathlib.Path]:
    """The configured folder, or every possible one."""
    folder = flags.configured_report_dir()
    return [folder] if folder else every()


def every() -> list[pathlib.Path]:
    """Our own first, then those of processes that we may read, then the usual places."""
    found = [flags.report_dir(), *of_processes(), *usual()]
    own, *others = dict.fromkeys(found)
    return [own, *(folder for folder in others if folder.is_dir())]


def of_processes() -> Iterator[pathlib.Path]:
    """The kernel shows processes of this user, and root those of all."""
    for pid in procfs.every():
        environ, user = procfs.environ(pid), procfs.user(pid)
        if environ is not None and user is not None:
            yield flags.report_dir_of(environ, user)


def usual() -> Iterator[pathlib.Path]:
    user = "*" if os.getuid() == 0 else str(os.getuid())
    yield from sorted(pathlib.Path("/run/user").glob(f"{user}/{NAME}"))
    yield from sorted(pathlib.Path("/tmp").glob(f"{NAME}-{user}"))


def problem(folder: pathlib.Path) -> str | None:
    """Explain why an existing folder is not trusted: somebody else could have put reports there."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror}); set {flags.REPORT_DIR} to a folder that can"
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if is_private and os.getuid() in (0, found.st_uid):
        return None
    text = f"{folder} is not read, because it is not a private folder of this user; servers do not report there"
    if folder.name.startswith(NAME) and stat.S_ISDIR(found.st_mode) and os.getuid() == found.st_uid:
        return f"{text}; `chmod 700 {folder}`, and start the servers anew"
    return text


def live(folders: list[pathlib.Path]) -> list[dict[str, Any]]:
    """The reports of all running processes, one for each."""
    return list({content["pid"]: content for content in trusted(folders) if report.is_live(content)}.values())


def trusted(folders: list[pathlib.Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        if not problem(folder):
            yield from (content for _, content in report.read_all(folder) if is_whole(content))


def is_whole(content: dict[str, Any]) -> bool:
    """Tell whether a report has what `status` shows."""
    fixes, kernels = content.get("fixes"), content.get("kernels")
    if not (content.keys() >= SHOWN and isinstance(fixes, list) and isinstance(kernels, dict)):
        return False
    every = [*((row, {"id", *OF_ROW}) for row in fixes), *((row, OF_ROW) for row in kernels.values())]
    return all(isinstance(row, dict) and row.keys() >= wanted for row, wanted in every)


def running() -> str:
    """In one sentence, for `doctor`."""
    folders = chosen()
    found = live(folders)
    if not found:
        return nobody(folders)
    return f"running processes that have loaded the plugin: {len(found)}; `bcg-fixes status` shows what they have"


def nobody(folders: list[pathlib.Path]) -> str:
    """The message if no running process reports: the folders read, and why there may be more."""
    ended = sum(not report.is_live(content) for content in trusted(folders))
    dead = f" (there are reports of {ended} that run here no longer: see their logs)" if ended else ""
    where = f"{', '.join(map(str, folders))}{dead}"
    text = f"no running process reports in {where}: none has loaded the plugin, or it reports "
    gone = f"; a logout removes XDG_RUNTIME_DIR, so start what outlives one with {flags.REPORT_DIR}=FOLDER"
    if flags.configured_report_dir():
        elsewhere = live(every())
        more = f"; {len(elsewhere)} report elsewhere" if elsewhere else ""
        return f"{text}elsewhere{more}; unset {flags.REPORT_DIR} to look wherever servers of this user can"
    if os.getuid() == 0:
        return f"{text}from inside a container, where `bcg-fixes status` has to be asked{gone}"
    return f"{text}as another user, whose reports that user and root see{gone}"
