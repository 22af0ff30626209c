# SPDX-License-Identifier: Apache-2.0
"""NVRTC as a user's torch brings it, and the newest: fetched by pip once, kept in the user's cache."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.cuda import nvrtc
from tests import wheels

# of torch for CUDA 12.6, 12.8 and 12.9, and the newest; that of 13.0 is among the requirements
VERSIONS = ("12.6.85", "12.8.93", "12.9.86", "13.5.37")


@functools.cache
def compiler(version: str) -> nvrtc.Compiler:
    return nvrtc.load(library(version))


def library(version: str) -> pathlib.Path:
    major = version.partition(".")[0]
    requirement = f"nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}=={version}"
    folder = wheels.filled(flags.cache_dir() / "nvrtc" / version, lambda draft: fetch(requirement, draft))
    return folder / f"libnvrtc.so.{major}"


def fetch(requirement: str, folder: pathlib.Path) -> None:
    """Put the libraries of a wheel into `folder`, without those that are there twice."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as fetched:
        subprocess.run([*command, "--dest", fetched, requirement], check=True)
        (wheel,) = pathlib.Path(fetched).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in map(pathlib.PurePath, archive.namelist()):
                if name.name.startswith("libnvrtc") and ".alt." not in name.name:
                    (folder / name.name).write_bytes(archive.read(str(name)))


def main() -> None:
    for version in VERSIONS:
        print(library(version), flush=True)


if __name__ == "__main__":
    main()
