# SPDX-License-Identifier: Apache-2.0
"""Segments of several lengths beside one another on a GPU: times and errors of the CUDA form with few heads.

    python benchmarks/gdn_segments.py --json gdn_segments.json

Every row has the length at which sequences are cut, 0 for not at all, and `cuda.segment_of` chooses among them. One
that is off from the fp32 reference, or whose replay differs from its eager run, is red. Needs no SGLang.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any
from unittest import mock

import torch

from sglang_bcg_fixes.kernels.gdn_extend import cuda
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks import gdn_tuning, gdn_variants
from benchmarks.bench import gdn_layer, timing
from benchmarks.bench.rows import GREEN, RED
from tests.kernels import gdn_reference

LENGTHS = (
    [2048],
    [4096],
    [8192],
    [16384],
    # long ones beside one another, which keep multiprocessors busy without segments
    [8192, 8192],
    [3000, 2700, 2492],
    [4096, 4096, 4096, 4096],
)
SHAPES = {
    **{name: shape for name, shape in gdn_layer.BY_NAME.items() if "_tp" in name},
    "qwen3_5_2b": gdn_layer.SHAPES["qwen3_5_2b"],
    "qwen3_5_27b_tp4": gdn_layer.Shape(48, 4, 12),
    "qwen3_5_27b_tp2": gdn_layer.Shape(48, 8, 24),
    "qwen3_next": gdn_layer.SHAPES["qwen3_next"],
}
SEGMENTS = (256, 512, 1024, 2048, 4096)
# so many segments are worth a measurement
MOST_SEGMENTS = 16
ROUNDS, WARM_UP = 7, 2


def segments_for(lengths: list[int]) -> list[int]:
    longest = max(lengths)
    least = cuda.LEAST_SEGMENTS - 1
    return [0, *(each for each in SEGMENTS if least * each < longest <= MOST_SEGMENTS * each)]


def case_of(
    name: str,
    shape: gdn_layer.Shape,
    lengths: list[int],
    variant: gdn_variants.Variant,
    device: gdn_layer.Device,
    rounds: int,
) -> list[dict[str, Any]]:
    problem = gdn_layer.Problem(shape, lengths, device.name)
    wanted = gdn_reference.recurrent(problem.inputs)
    found: dict[int, gdn_variants.Judged] = {}
    for segment in segments_for(lengths):
        with mock.patch.object(cuda, "segment_of", lambda *_, segment=segment: segment):
            found[segment] = gdn_variants.judged_variant(variant, problem, wanted, device)
    right = {
        str(each): functools.partial(one.arm.timed, device, problem.layers)
        for each, one in found.items()
        if not one.why
    }
    samples = timing.in_turn(right, rounds, WARM_UP)
    call: Any = gdn_layer.calls_of_ours(problem, gdn_layer.CUDA)(0)
    rows = []
    for each, one in found.items():
        row: dict[str, Any] = {"shape": name, "lengths": lengths, "segment": each, "chosen": each == call.segment}
        row |= {"verdict": RED if one.why else GREEN, "why": one.why}
        row["errors"] = {what: round(error, 5) for what, error in one.errors.items()}
        if str(each) in samples:
            row |= {what: spread.median for what, spread in timing.spreads(samples[str(each)]).items()}
        rows.append(row)
        gdn_tuning.say(" ".join(f"{what} {value}" for what, value in row.items() if value != ""))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", type=lambda names: names.split(","), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {timing.LEAST_ROUNDS}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gdn_segments.json"))
    options = parser.parse_args()
    device, rows = gdn_layer.Cuda(), list[dict[str, Any]]()
    variant = gdn_variants.Variant("", cuda.on_device(0), [])
    content: dict[str, Any] = {**environment.header(environment.here()), "rounds": options.rounds, "rows": rows}
    with torch.no_grad():
        for name in options.shapes:
            for lengths in LENGTHS:
                rows += case_of(name, SHAPES[name], lengths, variant, device, options.rounds)
                device.release()
                # write early, so an interrupted run leaves results
                options.json.write_text(gdn_tuning.with_a_line_for_each_row(content))
    return 0 if all(row["verdict"] == GREEN for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
