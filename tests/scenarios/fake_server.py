# SPDX-License-Identifier: Apache-2.0
"""Acts of a process beside the fake SGLang: build a runner, run a batch, suffer a change, ask `bcg-fixes status`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.process.process import Process

FUNCTION = "sglang.srt.target:function"


def begin() -> Process:
    """Load the plugin when what it patches is there."""
    importlib.import_module("sglang.srt.target")
    return plugin.load()


def change(name: str) -> None:
    """Make one of another plugin's changes, which come after ours."""
    from tests.scenarios import other_plugin

    other_plugin.CHANGES[name]()


def status(*arguments: str) -> str:
    command = [sys.executable, "-m", "sglang_bcg_fixes", "status", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def calls() -> dict[int, dict[str, int]]:
    """Count the calls of each place of extra_fix, for each process."""
    fixes = {process["pid"]: process["fixes"] for process in json.loads(status("--json"))["processes"]}
    return {pid: next(fix["calls"] for fix in rows if fix["id"] == "extra_fix") for pid, rows in fixes.items()}


def line() -> str:
    """Give the line of status about extra_fix."""
    return next(line for line in status("-v").splitlines() if line.split()[1] in ("extra_fix", "extra_fix:"))


def build() -> None:
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

    assert EAGLEDraftCudaGraphRunner("worker").eagle_worker == "worker"


def batch() -> Any:
    from sglang.srt.model_executor.model_runner import ModelRunner

    return ModelRunner().forward(1)
