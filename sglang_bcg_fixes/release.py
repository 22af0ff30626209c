"""The SGLang at hand: installed, in a folder, in a wheel or fetched by pip; never imported."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile

from sglang_bcg_fixes.probe import Folder, Source, Wheel


class ReleaseError(Exception):
    """There is no such SGLang, and what to do about it."""


def installed() -> Source | None:
    """The SGLang that `import sglang` would import here, or None."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    root = pathlib.Path(next(iter(found.submodule_search_locations))).parent
    return Source(Folder(root), written_version(root) or "unknown")


def in_folder(root: pathlib.Path) -> Source:
    """The SGLang in a folder: site-packages, a checkout, its `python/`, or the package itself."""
    for folder in (root, root / "python", root.parent):
        if (folder / "sglang" / "srt").is_dir() and (folder != root.parent or root.name == "sglang"):
            return Source(Folder(folder), written_version(folder) or "unknown")
    raise ReleaseError(f"{root}: no sglang/srt in it; give the folder that contains sglang/, such as site-packages")


def in_wheel(file: pathlib.Path) -> Source:
    if not file.is_file():
        raise ReleaseError(f"{file}: no such file")
    return Source(Wheel(file), file.name.split("-")[1])


def fetch(version: str, cache: pathlib.Path, python: str = "3.11") -> pathlib.Path:
    """The wheel of a release, fetched by pip once and kept in `cache`.

    `python` is the interpreter that the wheel is meant for; to read its source any will do, and not every release
    has one for every interpreter.
    """
    tag = f"cp{python.replace('.', '')}"
    cache.mkdir(parents=True, exist_ok=True)
    for pattern in (f"sglang-{version}-{tag}-*.whl", f"sglang-{version}-py3-*.whl"):
        for file in cache.glob(pattern):
            return file
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", "manylinux_2_34_x86_64", "--python-version", python]
    # pip writes in place: somebody else would read half a wheel, and one that is interrupted would stay
    with tempfile.TemporaryDirectory(dir=cache) as draft:
        outcome = subprocess.run([*command, "--dest", draft, f"sglang=={version}"], capture_output=True, text=True)
        files = sorted(pathlib.Path(draft).glob(f"sglang-{version}-*.whl"))
        if outcome.returncode or not files:
            last = outcome.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
            raise ReleaseError(
                f"pip cannot fetch sglang=={version}: {last[0]}; check the release's name and the network"
            )
        return files[-1].replace(cache / files[-1].name)


def written_version(root: pathlib.Path) -> str | None:
    """The version in the package's own `_version.py`, which an unpacked wheel has too."""
    file = root / "sglang" / "_version.py"
    found = re.search(r'^__version__.*= *["\'](.+?)["\']', file.read_text(), re.MULTILINE) if file.is_file() else None
    return found.group(1) if found else None
