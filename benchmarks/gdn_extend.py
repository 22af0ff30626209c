# SPDX-License-Identifier: Apache-2.0
"""Gated delta net's extend on a GPU: every kind of step against the fp32 reference, eagerly and replayed.

    python benchmarks/gdn_extend.py --cases 100                 # the CUDA implementation
    python benchmarks/gdn_extend.py --cases 100 --form triton
    python benchmarks/gdn_extend.py --cases 100 --states bfloat16
    python benchmarks/gdn_extend.py --cases 0 --hardly-forget 16384
    compute-sanitizer --tool memcheck python benchmarks/gdn_extend.py --cases 3 --tokens 700
    compute-sanitizer --tool memcheck python benchmarks/gdn_extend.py --cases 3 --shapes SHAPE --lengths 3137,7

Steps are those of tests/kernels/test_gdn_extend.py at a model's sizes, and random ones: prefixes, sequences without
tokens or without a slot, checkpoints, padding, few and many programs, spans. Memory that no kernel may touch is NaN.
Every step runs eagerly and in a graph that was captured for another batch, and both must have the same bits, also for
each sequence alone. States in bfloat16 are rounded where a span ends, so these steps have one. `python -m
benchmarks.bench` measures the speed.

Errors add up longest in heads that hardly forget: `--hardly-forget` compares each of them with fp64, ten seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, cuda, triton
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.lab.verify import environment

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import random_steps  # noqa: E402
from benchmarks.bench import gdn_layer  # noqa: E402
from tests.kernels import accuracy  # noqa: E402
from tests.kernels import gdn_extend_cases as cases  # noqa: E402
from tests.kernels.linear_extend_cases import faults_of_graphs, random_lengths, random_requests  # noqa: E402

FEW_HEADS, SEEDS = Shape(key_heads=2, value_heads=4, keys=128, values=128, width=4), 10
SMALL = Shape(key_heads=2, value_heads=6, keys=64, values=32, width=3)
# for one sequence alone; with random gates and keys SGLang's own state is off by 0.0053
OF_CHECKPOINT = accuracy.OF_SGLANGS * accuracy.TOLERANCE
LENGTHS = (0, 1, 2, 3, 15, 63, 64, 65, 127, 128, 129, 200, 511, 700, 1024, 2047, 5000, 7000)


IMPLEMENTATIONS: dict[str, Any] = {"cuda": cuda, "triton": triton}


def shapes() -> dict[str, Shape]:
    found = {
        name: Shape(each.key_heads, each.value_heads, each.head, each.head, each.width)
        for name, each in gdn_layer.SHAPES.items()
    }
    return {**found, "small": SMALL}


def draw(
    shape: Shape, source: random.Random, most_tokens: int, seed: int, kept: Any = torch.float32, lengths: Any = None
) -> cases.Step:
    lengths = lengths or random_lengths(source, LENGTHS, most_tokens)
    some = [number for number in range(len(lengths)) if source.random() < 0.3]
    return cases.draw(
        shape,
        lengths,
        device="cuda",
        # with few numbers in bfloat16, one that rounds badly is half of a result
        dtype=torch.float16 if shape is SMALL else source.choice((torch.bfloat16, torch.float16)),
        kept=kept,
        gates=source.choice(list(cases.GATES)),
        **random_requests(source, lengths, some),
        bias=source.random() < 0.3,
        equal_keys=source.random() < 0.1,
        seed=seed,
    )


def surroundings(step: cases.Step, source: random.Random) -> cases.Surroundings:
    return cases.Surroundings(
        padding=source.choice((0, 1, 63, 300)),
        more_tokens=source.choice((0, 500)),
        max_sequences=source.choice((len(step.lengths), 128)),
        columns_between=source.choice((0, 8)),
        span=source.choice((None, None, 1024)),
    )


def faults(step: cases.Step, around: cases.Surroundings, tuning: triton.Tuning, implementation: Any) -> Iterator[str]:
    def launched(each: cases.Step, beside: cases.Surroundings) -> cases.Launched:
        return cases.Launched(each, tuning, beside, modules=(implementation, metadata))

    return faults_of_graphs(step, around, launched, OF_CHECKPOINT)


def hardly_forget(
    tokens: int, implementation: Any, device: str = "cuda", seeds: int = SEEDS
) -> dict[str, dict[str, float]]:
    """Return the worst and the median head's error of each result."""
    # seeds are sequences
    step = cases.draw(FEW_HEADS, [tokens] * seeds, device=device, gates="near 0")
    after = cases.Launched(step, triton.Tuning(), modules=(implementation, metadata)).run()
    return {
        name: {"worst": round(float(heads.max()), 5), "median": round(float(heads.median()), 5)}
        for name, heads in cases.of_each_head(step, after).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="random steps of each shape")
    parser.add_argument("--form", dest="implementation", choices=IMPLEMENTATIONS, default="cuda")
    parser.add_argument("--states", choices=gdn_layer.STATES, default=gdn_layer.STATES[0])
    parser.add_argument("--shapes", default=",".join(shapes()), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=9000, help="at most so many in a step")
    parser.add_argument("--lengths", type=random_steps.lengths_of, metavar="M,N", help="of each step, not random ones")
    parser.add_argument("--hardly-forget", type=int, metavar="TOKENS", help="so many tokens, ten seeds, against fp64")
    parser.add_argument("--json", type=pathlib.Path, help="write the counts there")
    options = parser.parse_args()
    counts: dict[str, Any] = environment.header(environment.here()) | {"form": options.implementation}
    counts["states"], kept = options.states, getattr(torch, options.states)
    wrong = 0
    if options.hardly_forget:
        errors = hardly_forget(options.hardly_forget, IMPLEMENTATIONS[options.implementation])
        counts["hardly forget"] = {"tokens": options.hardly_forget, "seeds": SEEDS, "errors": errors}
        print(f"heads that hardly forget, {options.hardly_forget} tokens: {errors}", file=sys.stderr, flush=True)
        # not >, which NaN would pass
        wrong += not all(each["worst"] <= accuracy.TOLERANCE for each in errors.values())
    for name in options.shapes.split(","):
        shape = shapes()[name]
        source, found = random.Random(name), []
        for seed in range(options.cases):
            step = draw(shape, source, options.tokens, seed, kept, options.lengths)
            around = surroundings(step, source)
            if kept != torch.float32:
                around = dataclasses.replace(around, span=None)
            tuning = dataclasses.replace(triton.Tuning(), overlap=options.implementation == "triton" and seed % 4 == 3)
            mine = [
                f"{name}, seed {seed}, {step.lengths}: {fault}"
                for fault in faults(step, around, tuning, IMPLEMENTATIONS[options.implementation])
            ]
            found += mine[:3]
        print(*found[:20], f"{name}: {options.cases} steps, {len(found)} faults", sep="\n", file=sys.stderr, flush=True)
        counts[name] = {"steps": options.cases, "faults": found}
        wrong += len(found)
        if options.json:
            # write early, so an interrupted run leaves results
            options.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
