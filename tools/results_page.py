# SPDX-License-Identifier: Apache-2.0
"""Page of all recorded results: how each file was made, from runs.toml, and when and on what, from the file itself."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import kernel_times_page

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest brings it there
    import tomli as tomllib

FOLDER = kernel_times_page.RESULTS
PAGE, RUNS = FOLDER / "README.md", FOLDER / "runs.toml"
INTRODUCTION = """\
# What was measured

Every number in the docs is from a file here. `make record` repeats the main runs for your installed SGLang. Up to
2026-11-29 `python -m benchmarks.bench` was called `bcg-fixes bench`, and up to 2026-11-30 it timed servers, too, as
`serving.py` does now. A program that is no longer there answered its question for good; a file names the commit that
has it.
[Answers](../../docs/answers.md) and [times](../../docs/kernel_times.md) are easier to read on their own pages."""


def files() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir() if path not in (PAGE, RUNS))


def assigned() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Give each run its section and files; every file belongs to the first run that names it."""
    left = files()
    for section, runs in tomllib.loads(RUNS.read_text()).items():
        for run in runs:
            mine = [name for name in left if any(fnmatch.fnmatchcase(name, each) for each in run["files"])]
            if not mine:
                raise SystemExit(f"{RUNS.name}: {section}: no file is left for {run['files']}")
            left = [name for name in left if name not in mine]
            yield section, run, mine
    if left:
        raise SystemExit(f"{RUNS.name} does not say how to make {', '.join(left)}: add a run that names them")


def made(name: str) -> str:
    """SGLang, GPU, day and commit of a file, as far as it says them."""
    of = kernel_times_page.header(name) if name.endswith((".json", ".jsonl")) else {}
    gpu = of.get("gpu") or next(iter(of.get("gpus", ())), "")
    parts = (of.get("sglang"), str(gpu).removeprefix("NVIDIA "), str(of.get("date", ""))[:10], of.get("commit"))
    return ", ".join(str(part) for part in parts if part)


def page() -> str:
    lines = [INTRODUCTION]
    for section, runs in itertools.groupby(assigned(), lambda each: each[0]):
        lines += ["", f"## {section}", ""]
        for _, run, mine in runs:
            lines.append(f"- `{run['run']}`" + (f"<br>{run['note']}" if "note" in run else ""))
            data = [name for name in mine if not name.endswith(".png")] or mine
            lines += [f"  - [{name}]({name})" + (f": {told}" if (told := made(name)) else "") for name in data]
            lines += [f"  - ![{name}]({name})" for name in mine if name.endswith(".png") and name not in data]
    return "\n".join([*lines, ""])
