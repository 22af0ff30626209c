# SPDX-License-Identifier: Apache-2.0
"""The releases that everything is tested against: fetched by pip once, unpacked once, kept in the user's cache."""

from __future__ import annotations

import base64
import concurrent.futures
import csv
import hashlib
import os
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.source import releases
from tests import processes

RELEASES = tuple((processes.REPOSITORY / "tools" / "releases.txt").read_text().split())
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# behaviour of a release that is current is tried on this one
NEWEST = RELEASES[-1]


def since(release: str) -> tuple[str, ...]:
    """This release and all later ones."""
    return RELEASES[RELEASES.index(release) :]


def wheel(version: str) -> pathlib.Path:
    return releases.fetch(version, flags.cache_dir() / "wheels", PYTHON)


def unpacked(version: str) -> pathlib.Path:
    """The folder that holds this release's `sglang/`."""
    target = flags.cache_dir() / "unpacked" / f"{version}-{PYTHON}"
    return filled(target, lambda draft: zipfile.ZipFile(wheel(version)).extractall(draft))


def unlike_their_wheels(releases: Iterable[str] = RELEASES) -> list[str]:
    """A sentence on each unpacked release that is not what its wheel says."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(unlike_its_wheel, releases)
    return [sentence for sentence in found if sentence]


def unlike_its_wheel(version: str) -> str | None:
    root = unpacked(version)
    (record,) = root.glob("*.dist-info/RECORD")
    with record.open(newline="") as rows:
        for path, digest, _ in csv.reader(rows):
            kind, _, expected = digest.partition("=")
            if not digest:
                continue
            file = root / path
            data = file.read_bytes() if file.is_file() else b""
            made = base64.urlsafe_b64encode(hashlib.new(kind, data).digest()).rstrip(b"=").decode()
            if made != expected:
                return f"{file} is not what SGLang {version} ships; remove {root}, and it is unpacked again"
    return None


def filled(target: pathlib.Path, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Fill a folder that is not there. Tests run side by side: whoever is ready first puts a whole one in place."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = pathlib.Path(folder, "draft")
            draft.mkdir()
            fill(draft)
            try:
                draft.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    return target


def main() -> None:
    """Fetch and unpack them all; `make wheels`."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, root in enumerate(pool.map(unpacked, RELEASES), start=1):
            print(f"[{done:2}/{len(RELEASES)}] {root}", flush=True)


if __name__ == "__main__":
    main()
