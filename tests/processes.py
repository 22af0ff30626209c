# SPDX-License-Identifier: Apache-2.0
"""Code run in a process of its own, so that nothing it imports or patches stays behind."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from tests import programs, warm

REPOSITORY = pathlib.Path(__file__).parent.parent
FAKE_SGLANG = REPOSITORY / "tests" / "engine" / "fake_sglang"
# of a release that runs on the CPU
ON_CPU = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "bcg_fixes"}
# those that are on by default and run here: they have tests of their own, and are slow where none compiles
WITHOUT_KERNELS = {"SGLANG_BCG_KERNEL_FA_METADATA": "off", "SGLANG_BCG_KERNEL_MAMBA2_EXTEND": "off"}


def python(
    *arguments: str, paths: Iterable[pathlib.Path] = (), environment: Mapping[str, str] | None = None, timeout: int = 60
) -> subprocess.CompletedProcess[str]:
    """Python with these folders before the repository on its path, and none of our settings but those given."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment_of(paths, environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout * patience(),
    )


def patience() -> int:
    """How many times as long as usual a row may take that is tried once more; see tests/ledger.py."""
    return int(os.environ.get("TESTS_PATIENCE", "1"))


def environment_of(paths: Iterable[pathlib.Path], given: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "XDG"))}
    inherited["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, REPOSITORY]))
    # a release is a thousand modules: compiled once, and not in each of hundreds of processes
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**inherited, **given}


def on_cpu(
    root: pathlib.Path,
    *arguments: str,
    paths: Iterable[pathlib.Path] = (),
    environment: Mapping[str, str] | None = None,
    timeout: int = 300,
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Python with a release that runs on the CPU, and our plugin where the environment names no other.

    A program that calls `one_batch.import_sglang()` finds the release imported; `cold` is for what tests the import.
    """
    whole = environment_of([root, *paths], {**ON_CPU, **(environment or {})})
    with_graphs = None if cold else programs.with_graphs(arguments)
    return warm.starter(whole).run(arguments, whole, timeout * patience(), with_graphs)


def beside(
    root: pathlib.Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: int = 300,
    cold: bool = False,
    **settings: str,
) -> tuple[Any, str]:
    """The result of `on_cpu` without kernels, and its whole log."""
    with tempfile.TemporaryDirectory() as reports:
        done = on_cpu(
            root,
            *arguments,
            environment={"SGLANG_BCG_REPORT_DIR": reports, **WITHOUT_KERNELS, **(environment or {}), **settings},
            timeout=timeout,
            cold=cold,
        )
    return result(done), done.stdout + done.stderr


def result(done: subprocess.CompletedProcess[str]) -> Any:
    """Parse the JSON that it printed behind RESULT."""
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def code(text: str) -> str:
    return textwrap.dedent(text)
