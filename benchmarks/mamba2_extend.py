# SPDX-License-Identifier: Apache-2.0
"""The kernels of mamba2_extend on a GPU: random steps against the reference, replayed, and each sequence alone.

    python benchmarks/mamba2_extend.py --cases 20
    python benchmarks/mamba2_extend.py --cases 20 --form cuda
    compute-sanitizer --tool memcheck python benchmarks/mamba2_extend.py --cases 3 --tokens 700

Steps are those of tests/kernels/test_mamba2_extend.py at a model's sizes, and random ones: prefixes, sequences without
slots, checkpoints, states in both dtypes, NaN in all memory that must not be used. The time of a layer is
`python -m benchmarks.bench --shapes nemotron_h_8b,falcon_h1_34b`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import sys
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, cuda, triton
from sglang_bcg_fixes.lab.verify import environment

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import random_steps  # noqa: E402
from benchmarks.bench import mamba2_layer  # noqa: E402
from tests.kernels import accuracy  # noqa: E402
from tests.kernels import mamba2_extend_cases as cases  # noqa: E402
from tests.kernels.linear_extend_cases import faults_of_graphs, random_lengths, random_requests  # noqa: E402

SMALL = Shape(heads=6, groups=2, head=32, states=16, width=3)
OF_CHECKPOINT = accuracy.OF_SGLANGS * accuracy.TOLERANCE
# of sequences that the CUDA implementation may cut into segments
CUT_LENGTHS = (4096, 4097, 8192)
LENGTHS = (0, 1, 2, 3, 15, 63, 64, 65, 127, 128, 129, 200, 511, 700, 1024, 2047, 5000)


def shapes() -> dict[str, Shape]:
    return {**{name: each.of_kernel for name, each in mamba2_layer.SHAPES.items()}, "small": SMALL}


def draw(
    shape: Shape,
    source: random.Random,
    most_tokens: int,
    seed: int,
    device: str = "cuda",
    implementation: str = "triton",
    lengths: list[int] | None = None,
) -> cases.Step:
    choices = LENGTHS + CUT_LENGTHS if implementation == "cuda" else LENGTHS
    lengths = lengths or random_lengths(source, choices, most_tokens)
    some = [number for number in range(len(lengths)) if source.random() < 0.3]
    return cases.draw(
        shape,
        lengths,
        device=device,
        # with few numbers in bfloat16, one that rounds badly is half of a result
        dtype=torch.float16 if shape is SMALL else source.choice((torch.bfloat16, torch.float16)),
        # the CUDA implementation has a kernel for the former only
        kept=torch.float32 if implementation == "cuda" else source.choice((torch.float32, torch.bfloat16)),
        gates=source.choice(list(cases.GATES)),
        **random_requests(source, lengths, some),
        bias=source.random() < 0.7,
        seed=seed,
    )


IMPLEMENTATIONS: dict[str, Any] = {"triton": triton, "cuda": cuda}


def is_cut(step: cases.Step) -> bool:
    """Tell if the CUDA implementation cuts a sequence of this step into segments."""
    tables = metadata.Tables(max(1, step.tokens), len(step.lengths), "meta")
    segment = cuda.segment_in(step.tokens, step.shape, tables)
    return bool(segment) and max(step.lengths) >= cuda.LEAST_SEGMENTS * segment


def faults(step: cases.Step, around: cases.Surroundings, implementation: str = "triton", **others: Any) -> list[str]:
    def launched(each: cases.Step, beside: cases.Surroundings) -> cases.Launched:
        # Triton 3.8 sums gates in an order that depends on how far rows lie apart, which is the same for all of a layer
        beside = dataclasses.replace(beside, columns_between=around.columns_between)
        return cases.Launched(
            each, triton.tuning_for(each.shape), beside, modules=(IMPLEMENTATIONS[implementation], metadata)
        )

    return list(faults_of_graphs(step, around, launched, OF_CHECKPOINT, **others))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20, help="random steps of each shape")
    parser.add_argument("--shapes", default=",".join(shapes()), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--form", dest="implementation", choices=IMPLEMENTATIONS, default="triton")
    parser.add_argument("--tokens", type=int, default=9000, help="at most so many in a step")
    parser.add_argument("--lengths", type=random_steps.lengths_of, metavar="M,N", help="of each step, not random ones")
    parser.add_argument("--json", type=pathlib.Path, help="write the counts there")
    options = parser.parse_args()
    counts: dict[str, Any] = environment.header(environment.here()) | {"form": options.implementation}
    wrong = 0
    for name in options.shapes.split(","):
        source, found, cut = random.Random(name), [], 0
        for seed in range(options.cases):
            step = draw(
                shapes()[name],
                source,
                options.tokens,
                seed,
                implementation=options.implementation,
                lengths=options.lengths,
            )
            cut += is_cut(step)
            mine = faults(step, random_steps.surroundings(step, source), options.implementation)
            found += [f"{name}, seed {seed}, {step.lengths}: {fault}" for fault in mine[:3]]
        print(*found[:20], f"{name}: {options.cases} steps, {len(found)} faults", sep="\n", file=sys.stderr, flush=True)
        counts[name] = {"steps": options.cases, "faults": found}
        if options.implementation == "cuda":
            counts[name]["steps with a sequence that is cut"] = cut
        wrong += len(found)
        if options.json:
            # write early, so an interrupted run leaves results
            options.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
