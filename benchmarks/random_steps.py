# SPDX-License-Identifier: Apache-2.0
"""The command of a kernel's benchmark: random steps of each shape, then times, and both in a file as they come.

And what those of linear layers share: lengths, what is around a step, and the time of a layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sglang_bcg_fixes.lab.verify import environment
from tests.kernels.linear_extend_cases import Step, Surroundings, captured

LENGTHS = (0, 1, 2, 3, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 511, 700, 1024, 2047, 5000)
# tokens and sequences of a layer whose time is taken
TIMED = [(tokens, sequences) for tokens in (256, 1024, 4096, 8192, 16384) for sequences in (1, 8, 64)]
REPEATS, MOST_SEQUENCES = 20, 128


def surroundings(step: Step, source: random.Random) -> Surroundings:
    return Surroundings(
        padding=source.choice((0, 1, 63, 300)),
        more_tokens=source.choice((0, 500)),
        max_sequences=source.choice((len(step.lengths), MOST_SEQUENCES)),
        columns_between=source.choice((0, 8)),
    )


def lengths_of(text: str) -> list[int]:
    """Read the lengths of a step's sequences from an argument."""
    return [int(length) for length in text.split(",")]


def device_us(work: Callable[[], Any]) -> float:
    """Return the median device time of a replay, with cold caches."""
    work()
    replay, flushed = captured(work), torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(REPEATS):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000)
    return statistics.median(times)


def times(works: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    return {name: round(device_us(work), 1) for name, work in works.items()}


def command(
    doc: str,
    shapes: Mapping[str, Any],
    draw: Callable[[Any, random.Random, int, int], Any],
    faults: Callable[[Any, Any], list[str]],
    timed: Callable[[], Iterable[dict[str, Any]]],
) -> int:
    """Parse the command line, run it, and return its exit status: 1 if a step has a fault.

    `draw` draws a step of a shape, of at most so many tokens and with this seed.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20, help="random steps of each shape")
    parser.add_argument("--shapes", default=",".join(shapes), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=9000, help="at most so many in a step")
    parser.add_argument("--times", action="store_true", help="also measure a layer: device us of a replay")
    parser.add_argument("--json", type=pathlib.Path, help="write all of it there")
    options = parser.parse_args()
    told: dict[str, Any] = environment.header(environment.here()) | {"steps": {}, "times": []}
    wrong = 0

    def write() -> None:
        # early, so an interrupted run leaves results
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")

    for name in options.shapes.split(","):
        shape = shapes[name]
        source, found = random.Random(name), []
        for seed in range(options.cases):
            step = draw(shape, source, options.tokens, seed)
            mine = faults(step, surroundings(step, source))
            found += [f"{name}, seed {seed}, {step.lengths}: {fault}" for fault in mine[:3]]
        print(*found[:20], f"{name}: {options.cases} steps, {len(found)} faults", sep="\n", file=sys.stderr, flush=True)
        told["steps"][name] = {"steps": options.cases, "faults": found}
        wrong += len(found)
        write()
    for row in timed() if options.times else ():
        print(json.dumps(row), file=sys.stderr, flush=True)
        told["times"].append(row)
        write()
    return 1 if wrong else 0
