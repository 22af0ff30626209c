# SPDX-License-Identifier: Apache-2.0
"""Run NVIDIA's compute-sanitizer over a linear layer's CUDA implementation, its tools side by side; keep what they say.

    python benchmarks/sanitizer.py gdn_extend --json gdn_sanitizer.json
    python benchmarks/sanitizer.py mamba2_extend --json mamba2_sanitizer.json

Each tool watches steps of gdn_extend.py or mamba2_extend.py: random ones, and some with a sequence that is cut into
segments. A step that these find wrong counts as well. A row is green if the tool has ended and reported nothing.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench.rows import GREEN, RED

HERE = pathlib.Path(__file__).parent
PROGRAM = "compute-sanitizer"
GDN, MAMBA2 = "gdn_extend", "mamba2_extend"
# by the benchmark: what steps it is asked for
STEPS = {
    GDN: {
        "random": ("--shapes", "qwen3_next_tp8", "--cases", "3", "--tokens", "700"),
        "segments": ("--shapes", "qwen3_next_tp8", "--cases", "1", "--lengths", "3137,7"),
    },
    MAMBA2: {
        "random": ("--shapes", "nemotron_h_8b_tp8,falcon_h1_7b", "--cases", "3", "--tokens", "700"),
        "segments": ("--shapes", "nemotron_h_8b_tp8", "--cases", "1", "--lengths", "4161,7"),
        "segments of 256 states": ("--shapes", "falcon_h1_7b", "--cases", "1", "--lengths", "4161,7"),
    },
}
IMPLEMENTATION = ("--form", "cuda")
SUMMARY = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)")
# the instruction, and how often it was: the line of the source says enough
PLACE = re.compile(r"\+0x[0-9a-f]+| \[\d+ hazards\]")
MOST_REPORTS = 20


@dataclasses.dataclass(frozen=True)
class Watched:
    """A tool, the kernels that it watches by a part of their names, and the steps."""

    benchmark: str
    tool: str
    kernels: str
    steps: str

    def command(self) -> list[str]:
        watching = ["--kernel-name", f"kns={self.kernels}"] if self.kernels else []
        step = [str(HERE / f"{self.benchmark}.py"), *IMPLEMENTATION, *STEPS[self.benchmark][self.steps]]
        return [PROGRAM, "--tool", self.tool, "--print-limit", "100", *watching, sys.executable, *step]


def watched(benchmark: str) -> list[Watched]:
    """List what is run: every tool with every step."""
    ours, prepare = (f"bcg_{benchmark.removesuffix('_extend')}{kernel}" for kernel in ("", "_prepare"))
    steps = STEPS[benchmark]
    return [
        *(Watched(benchmark, tool, ours, each) for tool in ("memcheck", "synccheck", "racecheck") for each in steps),
        # it has to see what other kernels write
        *(Watched(benchmark, "initcheck", "", each) for each in steps),
        # without the ring
        Watched(benchmark, "racecheck", prepare, "random"),
    ]


def reports(said: str) -> dict[str, int]:
    """Lines of a report that name code of ours, without what differs from report to report."""
    lines = (PLACE.sub("", line.strip("= ")) for line in said.splitlines() if line.startswith("=") and "bcg" in line)
    return dict(collections.Counter(lines).most_common(MOST_REPORTS))


def run(each: Watched, seconds: float) -> dict[str, Any]:
    command, began = each.command(), time.monotonic()
    row = dataclasses.asdict(each)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {**row, "verdict": RED, "why": f"not done within {seconds:.0f} s"}
    said = done.stdout + done.stderr
    summary = SUMMARY.findall(said)
    steps = re.findall(r"\d+ steps, \d+ faults", said)
    row |= {"seconds": round(time.monotonic() - began, 1), "summary": summary, "steps_said": ", ".join(steps)}
    row |= {"reports": reports(said)}
    nothing = len(summary) == 1 and re.search(r"SUMMARY: 0 ", summary[0])
    if nothing and not done.returncode:
        return {**row, "verdict": GREEN, "why": ""}
    return {**row, "verdict": RED, "why": f"exit status {done.returncode}: {' '.join(said.split())[-300:]}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", choices=STEPS)
    parser.add_argument("--seconds", type=float, default=300, help="at most so many for each (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="so many side by side (default: all)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("sanitizer.json"))
    options = parser.parse_args()
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True).stdout
    content: dict[str, Any] = environment.header(environment.here()) | {"steps": STEPS[options.benchmark]}
    content["compute-sanitizer"] = re.findall(r"Version (\S+)", version)
    content["rows"] = rows = []
    every = watched(options.benchmark)
    with concurrent.futures.ThreadPoolExecutor(options.jobs or len(every)) as pool:
        for done in concurrent.futures.as_completed(pool.submit(run, each, options.seconds) for each in every):
            rows.append(done.result())
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            # write early, so an interrupted run leaves results
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(row["verdict"] == GREEN for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
