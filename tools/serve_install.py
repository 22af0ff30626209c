# SPDX-License-Identifier: Apache-2.0
"""Install a released SGLang and this checkout's plugin into a virtual environment, for `make demo` and `make serve`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence

from serve_server import ServeError

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints"
REQUIREMENTS_ON_CPU = REPOSITORY / "cpu_sglang" / "requirements.txt"
STAMP = "bcg-fixes-serve.json"

RELEASES = tuple((REPOSITORY / "tools" / "releases.txt").read_text().split())
# the pinned packages have no wheels for an older python
OLDEST_PYTHON = (3, 11)
TRIED_PYTHONS = ("3.11", "3.12")
# what pip says when it reached no index
NO_NETWORK = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Max retries exceeded")


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise ServeError(f"this is Python {sys.version.split()[0]}. Next: add PYTHON=python3.11 to your command.")


def environment_folder(environ: Mapping[str, str]) -> pathlib.Path:
    return pathlib.Path(environ.get("BCG_FIXES_VENV") or REPOSITORY / ".venv").absolute()


def cache_folder(environ: Mapping[str, str], command: str) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(base).expanduser() / "sglang-bcg-fixes" / command
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepare(folder: pathlib.Path, release: str, on_gpu: bool) -> pathlib.Path:
    """Install missing packages and return the environment's python."""
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    wanted = json.dumps({"release": release, "on_gpu": on_gpu, "inputs": digest_of_inputs()})
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    # an interrupted installation must not pass for a complete one
    stamp.unlink(missing_ok=True)
    # pip comes last, so an environment that has it is complete
    if not (folder / "bin" / "pip").exists():
        create(folder)
    (install_on_gpu if on_gpu else install_on_cpu)(python, release)
    pip(python, "the plugin, from this checkout", "--editable", str(REPOSITORY))
    stamp.write_text(wanted)
    return python


def digest_of_inputs() -> str:
    """Digest that changes whenever an existing environment may be out of date."""
    files = [REPOSITORY / name for name in ("pyproject.toml", "setup.py", "entry_points.toml")]
    files += [REQUIREMENTS_ON_CPU, *sorted(CONSTRAINTS.glob("*.txt"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def create(folder: pathlib.Path) -> None:
    try:
        with step(f"creating {folder}"):
            venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise ServeError(
            f"no virtual environment could be made in {folder}: {error}. On Debian the module it needs is a package "
            f"of its own. Next: apt install python3-venv, then the same command."
        ) from error


def install_on_cpu(python: pathlib.Path, release: str) -> None:
    torch = pinned("torch")
    pip(python, torch, torch, size=" (200 MB from PyTorch's index of CPU builds, else 3 GB: README.md)")
    # without dependencies: the list is complete, and torch's CUDA build wants other versions
    pip(python, "what SGLang imports", "--no-deps", "--requirement", str(REQUIREMENTS_ON_CPU))
    pip(python, f"sglang {release}", "--no-deps", f"sglang=={release}")


def install_on_gpu(python: pathlib.Path, release: str) -> None:
    constraints = CONSTRAINTS / f"{release}.txt"
    limits = ["--constraint", str(constraints)] if constraints.exists() else []
    pip(python, f"sglang {release}", *limits, f"sglang=={release}", size=" and its CUDA packages (several gigabytes)")


def pinned(package: str) -> str:
    for line in REQUIREMENTS_ON_CPU.read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line
    raise ServeError(f"{REQUIREMENTS_ON_CPU} does not pin {package}. Next: add a line {package}==VERSION to it.")


def pip(python: pathlib.Path, what: str, *arguments: str, size: str = "") -> None:
    # SGLang's modules are compiled when they are imported, which most never are
    options = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    command: Sequence[str] = [str(python), "-m", "pip", "install", *options, *arguments]
    with step(f"installing {what}{size}"):
        ran = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode != 0:
            raise ServeError(explained(what, ran.stdout.strip()))


def explained(what: str, said: str) -> str:
    """Say in one sentence why pip failed, and what to do next."""
    if NO_NETWORK.search(said):
        return f"pip reached no package index for {what}. Next: connect, or set PIP_INDEX_URL, then the same command."
    last = said.rpartition("\n")[2].removeprefix("ERROR: ")
    version = ".".join(map(str, sys.version_info[:2]))
    next_step = "repair that, then the same command"
    if "No matching distribution" in said:
        next_step = (
            "see `pip config list`: your index lacks it" if version in TRIED_PYTHONS else "add PYTHON=python3.11"
        )
    return f"pip of Python {version} could not install {what}: {last}. Next: {next_step}."


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show a line for what takes long: what it is, then its seconds."""
    started = time.monotonic()
    print(f"{what} ...", end="", flush=True)
    try:
        yield
        print(f" {time.monotonic() - started:.0f} s", end="")
    finally:
        print(flush=True)
