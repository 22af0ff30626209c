# SPDX-License-Identifier: Apache-2.0
"""The releases that everything is tested against: fetched by pip once, unpacked once, kept in the user's cache."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import Callable

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
