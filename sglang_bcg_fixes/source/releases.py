# SPDX-License-Identifier: Apache-2.0
"""The SGLang at hand: installed, in a folder, in a wheel or fetched by pip; never imported."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile

from sglang_bcg_fixes.source.tree import Folder, Source, Wheel

# name, version, perhaps a build, and three tags
WHEEL = re.compile(r"[^-]+-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")
# of what pip says: the versions that it was offered, and why a connection did not come about
OFFERED = re.compile(r"\(from versions: (?P<versions>[^)]*)\)")
NO_NETWORK = (
    *("Temporary failure in name resolution", "Name or service not known", "Connection refused"),
    *("Network is unreachable", "No route to host", "Tunnel connection failed", "Cannot connect to proxy"),
    *("CERTIFICATE_VERIFY_FAILED", "timed out", "connection broken", "ConnectionError"),
)


class ReleaseError(Exception):
    """The SGLang asked for does not exist; the message names the next step."""


def installed() -> Source | None:
    """The SGLang that `import sglang` would import here, or None."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    root = pathlib.Path(next(iter(found.submodule_search_locations))).parent
    return Source(Folder(root), written_version(root) or "unknown")


def others_on_the_path(source: Source) -> list[str]:
    """Folders of another SGLang, which `import sglang` would find if this one were not before them."""
    folders = dict.fromkeys(str(pathlib.Path(entry or ".").resolve()) for entry in sys.path)
    own = str(pathlib.Path(str(source.files)).resolve())
    return [folder for folder in folders if folder != own and pathlib.Path(folder, "sglang", "srt").is_dir()]


def in_folder(root: pathlib.Path) -> Source:
    """The SGLang in a folder: site-packages, a checkout, its `python/`, or the package itself."""
    for folder in (root, root / "python", root.parent):
        if (folder / "sglang" / "srt").is_dir() and (folder != root.parent or root.name == "sglang"):
            return Source(Folder(folder), written_version(folder) or "unknown")
    raise ReleaseError(f"{root}: no sglang/srt in it; give the folder that contains sglang/, such as site-packages")


def in_wheel(file: pathlib.Path) -> Source:
    if not file.is_file():
        raise ReleaseError(f"{file}: no such file; give a wheel of SGLang")
    named = WHEEL.fullmatch(file.name)
    if not named:
        raise ReleaseError(
            f"{file} is not named as a wheel is, such as sglang-0.5.12-cp311-cp311-linux_x86_64.whl; give it back its "
            f"name, or unpack it and give the folder with --root"
        )
    wheel = Wheel(file)
    if not any(name.startswith("sglang/srt/") for name in wheel.names):
        raise ReleaseError(f"{file}: no sglang/srt in it; give a wheel of SGLang")
    wheel.check()
    return Source(wheel, named["version"])


def kept(version: str, cache: pathlib.Path, python: str = "3.11") -> pathlib.Path | None:
    """The wheel of a release that was fetched before, or None."""
    refuse_unless_version(version)
    for pattern in (f"sglang-{version}-{tag(python)}-*.whl", f"sglang-{version}-py3-*.whl"):
        for file in cache.glob(pattern):
            return file
    return None


def tag(python: str) -> str:
    return f"cp{python.replace('.', '')}"


def refuse_unless_version(version: str) -> None:
    if VERSION.fullmatch(version):
        return
    meant = version.strip().lower().removeprefix("v")
    hint = f"did you mean {meant}?" if VERSION.fullmatch(meant) else "give one such as 0.5.12.post1"
    raise ReleaseError(f"'{version}' is not a release of SGLang; {hint}")


def fetch(version: str, cache: pathlib.Path, python: str = "3.11") -> pathlib.Path:
    """The wheel of a release, fetched by pip once and kept in `cache`.

    `python` is the interpreter that the wheel is meant for; to read its source any will do, and not every release
    has one for every interpreter.
    """
    found = kept(version, cache, python)
    if found:
        return found
    if not importlib.util.find_spec("pip"):
        raise ReleaseError(
            f"{sys.executable} has no pip to fetch sglang=={version} with; install pip there, or fetch the wheel "
            f"elsewhere and give it with --wheel"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return download(version, cache, python)
    except OSError as error:
        raise ReleaseError(
            f"{cache} cannot take the wheel of sglang=={version} ({error.strerror}); set SGLANG_BCG_CACHE_DIR to a "
            f"folder that can be written"
        ) from error


def download(version: str, cache: pathlib.Path, python: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform", "manylinux_2_34_x86_64", "--python-version", python]
    # pip writes in place: somebody else would read half a wheel, and one that is interrupted would stay
    with tempfile.TemporaryDirectory(dir=cache) as draft:
        outcome = subprocess.run([*command, "--dest", draft, f"sglang=={version}"], capture_output=True, text=True)
        files = sorted(pathlib.Path(draft).glob(f"sglang-{version}-*.whl"))
        if outcome.returncode or not files:
            raise ReleaseError(f"pip cannot fetch sglang=={version}: {why_not_fetched(outcome.stderr)}")
        return files[-1].replace(cache / files[-1].name)


def why_not_fetched(log: str) -> str:
    """Say from what pip printed whether the network or the release is missing, and the next step."""
    offered = OFFERED.search(log)
    if offered and offered["versions"] != "none":
        newest = offered["versions"].split(", ")[-1]
        return f"its index has no such release for this platform, the newest there is {newest}; check the number"
    if broken := next((words for words in NO_NETWORK if words in log), None):
        return (
            f"it reaches no package index ({broken}); check the network, or fetch the wheel elsewhere and give it "
            f"with --wheel"
        )
    if offered:
        return "its index offers no SGLang, or does not answer; check the network, and the index in `pip config list`"
    last = log.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"{last[0]}; run `pip download --no-deps sglang` to see more"


def written_version(root: pathlib.Path) -> str | None:
    """The version in the package's own `_version.py`, which an unpacked wheel has too."""
    text = Folder(root).read("sglang/_version.py") or ""
    found = re.search(r'^__version__.*= *["\'](.+?)["\']', text, re.MULTILINE)
    return found.group(1) if found else None
