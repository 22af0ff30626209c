# SPDX-License-Identifier: Apache-2.0
"""Examine an interpreter: its SGLang, this plugin, a GPU.

Runs inside it: python -m sglang_bcg_fixes.lab.verify.environment
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any

from sglang_bcg_fixes import __version__
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.tree import Folder

DISTRIBUTIONS = ("torch", "triton", "sglang-kernel", "sgl-kernel", "flashinfer-python", "transformers")
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


class EnvironmentMissing(Exception):
    """The interpreter lacks something that a server needs; the message says how to fix it."""


def look(python: str) -> dict[str, Any]:
    """Call `here()` in another interpreter; ours stays free of torch."""
    done = subprocess.run([python, "-m", __name__], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise EnvironmentMissing(f"{python} cannot run this plugin: {last}; install sglang-bcg-fixes with its SGLang")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here() -> dict[str, Any]:
    source = releases.installed()
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "bcg_fixes": __version__,
        "commit": commit(),
        "has_entry_point": any(entry.name == "bcg_fixes" for entry in plugins),
        "sglang": source.version if source else None,
        "root": str(source.files.root) if source and isinstance(source.files, Folder) else None,
        "versions": versions,
        **gpu(),
    }


def header(found: dict[str, Any]) -> dict[str, Any]:
    """Header of a result file: when and on what, without paths of that machine."""
    known = {name: value for name, value in found.items() if name not in ("root", "has_entry_point")}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"format": 1, "date": date, **known}


def gpu() -> dict[str, Any]:
    """Name, number and driver of the GPUs, and memory in GiB of the fullest, or why there is none."""
    try:
        import torch
    except ImportError as error:
        return {"gpu": None, "why": f"torch cannot be imported ({error})"}
    if not torch.cuda.is_available():
        return {"gpu": None, "why": f"torch {torch.__version__} sees no CUDA device"}
    count = torch.cuda.device_count()
    free, total = min(torch.cuda.mem_get_info(device) for device in range(count))
    sizes = {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
    return {"gpu": torch.cuda.get_device_name(), "gpu_count": count, "driver": driver(), **sizes}


def driver() -> str | None:
    text = DRIVER.read_text() if DRIVER.is_file() else ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def commit() -> str | None:
    """Commit of the checkout that this package runs from, if any."""
    folder = pathlib.Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    print(json.dumps(here()))
    sys.exit(0)
