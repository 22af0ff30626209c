# SPDX-License-Identifier: Apache-2.0
"""Install a released SGLang and this checkout's plugin into their own virtual environment."""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import sys
import venv
from collections.abc import Sequence

from serve_server import ServeError

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
CONSTRAINTS = REPOSITORY / "constraints"
REQUIREMENTS_ON_CPU = REPOSITORY / "cpu_sglang" / "requirements.txt"
STAMP = "bcg-fixes-serve.json"

RELEASES = tuple((REPOSITORY / "tools" / "releases.txt").read_text().split())


def prepare(folder: pathlib.Path, release: str, on_gpu: bool) -> pathlib.Path:
    """Install missing packages and return the environment's python."""
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    wanted = json.dumps({"release": release, "on_gpu": on_gpu, "inputs": digest_of_inputs()})
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        print(f"{folder} has sglang {release} and this checkout's plugin already", flush=True)
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
    print(f"creating the virtual environment {folder}", flush=True)
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise ServeError(
            f"no virtual environment could be made in {folder}: {error}. On Debian the module it needs is a package "
            f"of its own. Next: apt install python3-venv, then make serve again."
        ) from error


def install_on_cpu(python: pathlib.Path, release: str) -> None:
    torch = pinned("torch")
    print(
        f"no nvidia-smi here, so SGLang will run on the CPU. {torch} is about 200 MB where pip is configured with "
        "PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL; its address is on pytorch.org), else about 3 GB",
        flush=True,
    )
    pip(python, torch, torch)
    # without dependencies: the list is complete, and torch's CUDA build wants other versions
    pip(python, "what SGLang imports", "--no-deps", "--requirement", str(REQUIREMENTS_ON_CPU))
    pip(python, f"sglang {release}", "--no-deps", f"sglang=={release}")


def install_on_gpu(python: pathlib.Path, release: str) -> None:
    print(f"installing sglang {release} with its CUDA packages: several gigabytes", flush=True)
    constraints = CONSTRAINTS / f"{release}.txt"
    limits = ["--constraint", str(constraints)] if constraints.exists() else []
    pip(python, f"sglang {release}", *limits, f"sglang=={release}")


def pinned(package: str) -> str:
    for line in REQUIREMENTS_ON_CPU.read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line
    raise ServeError(f"{REQUIREMENTS_ON_CPU} does not pin {package}. Next: add a line {package}==VERSION to it.")


def pip(python: pathlib.Path, what: str, *arguments: str) -> None:
    print(f"installing {what}", flush=True)
    command: Sequence[str] = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        version = ".".join(map(str, sys.version_info[:3]))
        raise ServeError(
            f"pip could not install {what} (exit status {status}): {' '.join(command)}\n"
            f"Its reason is above. Next: if it found no matching distribution, this python ({version}) may be too new "
            f"or too old for it, so try make serve with 3.11 or 3.12; if the network failed, try again."
        )
