# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled kernels for this user alone; damaged or foreign files are compiled again."""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
import tempfile

MAGIC = b"bcg-fixes cubin 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size


class CacheError(Exception):
    """Raised when the cache cannot be read or written; the message is the reason."""


def key(*parts: bytes | str) -> str:
    """Hash everything the machine code depends on; lengths keep ("ab", "c") apart from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()


def seal(name: str, cubin: bytes) -> bytes:
    """Prefix the cubin with a digest that proves it complete and made for this name."""
    return MAGIC + hashlib.sha256(name.encode() + cubin).digest() + cubin


def unseal(name: str, content: bytes) -> bytes | None:
    """Return the cubin, or None if the file is truncated, altered, or made for another name."""
    cubin = content[len(MAGIC) + DIGEST_BYTES :]
    return cubin if content == seal(name, cubin) else None


def read(folder: pathlib.Path, name: str) -> bytes | None:
    """Return the cached cubin or None; raise CacheError if the file must not be loaded."""
    path = folder / name
    try:
        with open(path, "rb", opener=open_untricked) as file:
            # stat of the open file, so it cannot be exchanged in between
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CacheError(f"{path} is not a file")
            refuse_what_others_can_write(path, found)
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error.strerror})") from error
    cubin = unseal(name, content)
    if cubin is None:
        raise CacheError(f"{path} is damaged")
    return cubin


def open_untricked(path: str, how: int) -> int:
    """Open without following a link, and without waiting for the writer of a pipe."""
    return os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK)


def keep(folder: pathlib.Path, name: str, cubin: bytes) -> None:
    """Write atomically: readers see the old file or the new one, and the last writer wins."""
    draft = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise CacheError(f"{folder} is not a folder")
        refuse_what_others_can_write(folder, found)
        # mkstemp's file has mode 600 and a name that nobody else uses
        opened, draft = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        with os.fdopen(opened, "wb") as file:
            file.write(seal(name, cubin))
        os.replace(draft, folder / name)
    except OSError as error:
        if draft:
            pathlib.Path(draft).unlink(missing_ok=True)
        raise CacheError(f"nothing can be kept in {folder} ({error.strerror})") from error


def refuse_what_others_can_write(path: pathlib.Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise CacheError(f"{path} belongs to the user with the number {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o})")
