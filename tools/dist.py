# SPDX-License-Identifier: Apache-2.0
"""Build what is published into dist/, from the last commit: source distribution, wheel, SBOM, checksums; `make dist`.

Everything is built twice, from two copies and under two umasks, the second wheel from the unpacked source distribution.
Results that differ are an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

import sbom

REPOSITORY = pathlib.Path(__file__).parent.parent
DIST = REPOSITORY / "dist"
BACKEND = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# a wheel with machine code is for one kind of GPU, and not published
NOT_INHERITED = "BCG_FIXES_CUDA_ARCHS"


class DistError(Exception):
    """Nothing that can be published, and why."""


def main() -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = built_twice(pathlib.Path(folder))
            shutil.rmtree(DIST, ignore_errors=True)
            DIST.mkdir()
            for file in files:
                shutil.copyfile(file, DIST / file.name)
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    for wheel in DIST.glob("*.whl"):
        (DIST / f"{wheel.name.removesuffix('.whl')}.cdx.json").write_text(f"{json.dumps(sbom.made(wheel), indent=1)}\n")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    return 0


def built_twice(folder: pathlib.Path) -> list[pathlib.Path]:
    changes = git("status", "--porcelain")
    if changes:
        raise DistError(f"there are changes that are not committed; commit or remove them:\n{changes}")
    epoch = git("log", "-1", "--format=%ct")
    first, second = exported(folder / "first"), exported(folder / "second")
    source = built("build_sdist", first, folder / "1", epoch, 0o022)
    compare(source, built("build_sdist", second, folder / "2", epoch, 0o077))
    wheel = built("build_wheel", first, folder / "1", epoch, 0o022)
    with tarfile.open(source) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    compare(wheel, built("build_wheel", unpacked, folder / "2", epoch, 0o077))
    return [source, wheel]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise DistError(f"git {arguments[0]}: {done.stderr.strip()}; run this in a checkout")
    return done.stdout.strip()


def exported(folder: pathlib.Path) -> pathlib.Path:
    """Lay out the files of the last commit."""
    archive = folder.with_suffix(".tar")
    git("archive", f"--output={archive}", "HEAD")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


def built(what: str, checkout: pathlib.Path, folder: pathlib.Path, epoch: str, umask: int) -> pathlib.Path:
    """Have this interpreter's setuptools build it; it is pinned, since a wheel names it."""
    folder.mkdir(exist_ok=True)
    before = set(folder.iterdir())
    environment = {name: value for name, value in os.environ.items() if name != NOT_INHERITED}
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, what, str(folder)],
        cwd=checkout,
        env={**environment, "SOURCE_DATE_EPOCH": epoch},
        umask=umask,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise DistError(f"{what} fails:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (file,) = set(folder.iterdir()) - before
    return file


def compare(first: pathlib.Path, second: pathlib.Path) -> None:
    if first.name != second.name or first.read_bytes() != second.read_bytes():
        raise DistError(f"{first.name}: two builds differ, so nobody could check it by building it again")


if __name__ == "__main__":
    raise SystemExit(main())
