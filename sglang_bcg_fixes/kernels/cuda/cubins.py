"""Compiled kernels kept on disk for this user alone: what is damaged, or could be another user's, is compiled again."""

from __future__ import annotations

import hashlib
import os
import pathlib
import stat
import tempfile

MAGIC = b"bcg-fixes cubin 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size


class CacheError(Exception):
    """What is in the cache cannot be used, or nothing can be put there, and why."""


def key(*parts: bytes | str) -> str:
    """One name for everything that the machine code depends on; lengths keep ("ab", "c") from meeting ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()


def seal(name: str, cubin: bytes) -> bytes:
    """The content of a file: it proves that it is complete, and that it is the one that the name asks for."""
    return MAGIC + hashlib.sha256(name.encode() + cubin).digest() + cubin


def unseal(name: str, content: bytes) -> bytes | None:
    """The cubin, or None where the file is cut off, altered, or was made for another name."""
    cubin = content[len(MAGIC) + DIGEST_BYTES :]
    return cubin if content == seal(name, cubin) else None


def read(folder: pathlib.Path, name: str) -> bytes | None:
    """What is kept under this name, or None where nothing is; CacheError where something is that must not be loaded."""
    path = folder / name
    try:
        with open(path, "rb", opener=open_untricked) as file:
            # asked of the open file, so that it cannot be exchanged in between
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
    """Follows no link, and does not wait for somebody to write to a pipe."""
    return os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK)


def keep(folder: pathlib.Path, name: str, cubin: bytes) -> None:
    """Put it there whole: whoever reads at the same time sees the old file or the new one, and the last writer wins."""
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
