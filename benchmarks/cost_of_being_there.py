# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a process: the time of load() beyond SGLang's own imports, and of one patched call.

    make cost

Without a GPU, SGLang's imports go through cpu_sglang. load() is timed in three kinds of process: one that has
imported nothing of SGLang, one that has imported the scheduler, as SGLang's own have, and one that has imported what is
patched, so that the patching itself is timed too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.wrappers import wrap
from sglang_bcg_fixes.model import How

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests import wheels  # noqa: E402

BEFORE = {
    "nothing": "",
    "the scheduler": "import sglang.srt.managers.scheduler",
    "what is patched": "import sglang.srt.managers.scheduler, sglang.srt.layers.radix_linear_attention",
}
LOAD = """
import json, sys, time
from cpu_sglang import stand_ins
stand_ins.install()
{before}
modules = set(sys.modules)
start = time.perf_counter()
from sglang_bcg_fixes import plugin
report = plugin.load().report
seconds = time.perf_counter() - start
new = [name for name in set(sys.modules) - modules if name.partition(".")[0] == "sglang"]
print("RESULT", json.dumps(dict(seconds=seconds, sglang_modules_imported=len(new), applied=report.ids("applied"))))
"""


def load_seconds(root: pathlib.Path, before: str, rounds: int) -> dict[str, Any]:
    """Median time of import and load() in fresh processes."""
    program = LOAD.format(before=before)
    paths = [root, REPOSITORY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_INTERPRET": "1"}
    # as behind pip, which compiles what it installs; the first round does it here, and is not counted
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found: list[dict[str, Any]] = []
    for _ in range(rounds + 1):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{root}: the process failed:\n{done.stderr[-2000:]}")
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        found.append(json.loads(line.removeprefix("RESULT ")))
    del found[0]
    seconds = [each["seconds"] for each in found]
    return {**found[0], "seconds": round(statistics.median(seconds), 3), "slowest": round(max(seconds), 3)}


def call_nanoseconds() -> dict[str, float]:
    """Per call: the function itself, patched in each way, and an operation that became a break, outside a graph."""

    def plain(a: int, b: int, c: int, d: int) -> int:
        return a

    def around(original: Callable[..., int], *args: int) -> int:
        return original(*args)

    def after(result: int, *args: int) -> int:
        return result

    def before(*args: int) -> None:
        return None

    class Context:
        @staticmethod
        def is_in_breakable_cuda_graph() -> bool:
            return False

    graph_break.load = lambda name: Context  # type: ignore[assignment, return-value]
    graph_break.decorate = lambda inner, stub: inner
    functions: dict[str, Callable[..., Any]] = {
        "direct": plain,
        "around": wrap(plain, How.AROUND, around),
        "after": wrap(plain, How.AFTER, after),
        "before": wrap(plain, How.BEFORE, before),
        "forgotten break outside a graph": graph_break.rebuild(plain, around),
    }
    number = 200_000
    return {
        name: min(timeit.repeat("f(1, 2, 3, 4)", globals={"f": function}, number=number, repeat=7)) / number * 1e9
        for name, function in functions.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", default=[], help="such as 0.5.12.post1; repeat")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    calls = call_nanoseconds()
    result = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "call_nanoseconds": {name: round(value) for name, value in calls.items()},
        "rounds": options.rounds,
        "load_after_importing": {
            release: {
                name: load_seconds(wheels.unpacked(release), code, options.rounds) for name, code in BEFORE.items()
            }
            for release in options.release
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
