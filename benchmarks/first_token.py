"""Time to the first token of a tiny Qwen3-Next, alone: stock, patched, replay refused, and without prefill graphs.

    make first-token

On a machine with a GPU, in an environment with SGLang and this package. No time is given for a server whose answers
differ from the reference's: `bcg-fixes verify` says more about those.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence

from sglang_bcg_fixes import registry, release
from sglang_bcg_fixes.verify import cases, command, environment
from sglang_bcg_fixes.verify.compare import RED

LENGTHS, ROUNDS, WARM_UP = (253, 1021), 25, 5
ORDER = (command.PATCHED, command.REFERENCE, command.STOCK, command.EAGER, command.REFERENCE, command.PATCHED)


def one_token_each(buckets: Sequence[int]) -> list[cases.Call]:
    script = cases.Script()
    for length in LENGTHS:
        for _ in range(ROUNDS):
            script.ask(str(length), [length], new_tokens=1)
    return script.calls


CASE = cases.Case("first_token", "The first token.", "qwen3_next", script=one_token_each, logprobs=False)


def first_token_milliseconds(run: command.Run, calls: list[dict[str, float]]) -> dict[str, float]:
    taken = collections.defaultdict(list)
    for call, answered in zip(run.calls, calls, strict=True):
        taken[call.part].append(answered["milliseconds"])
    return {length: round(statistics.median(times[WARM_UP:]), 2) for length, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    options = parser.parse_args()
    here, source, known = environment.look(sys.executable), release.installed(), registry.discover()
    assert here["gpu"] and source, "a GPU and an SGLang are needed"
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        command.make_models(sys.executable, [CASE], folder)
        runs = command.runs_of(CASE, ORDER, known, source, cases.BUCKETS, folder)
        # one at a time: they would take the GPU from each other
        found = command.serve(runs, sys.executable, jobs=1)
    rows = []
    for run, outcome in found:
        verdict = command.judge(run, found)
        row = {"arm": run.arm, "number": run.number, "verdict": verdict.state, "why": verdict.why}
        if outcome.finished and verdict.state != RED:
            row["first_token_ms"] = first_token_milliseconds(run, outcome.calls)
        rows.append(row)
        print(row)
    options.json.write_text(json.dumps({**here, "rounds": ROUNDS, "servers": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
