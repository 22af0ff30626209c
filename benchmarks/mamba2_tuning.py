# SPDX-License-Identifier: Apache-2.0
"""Times of the two kernels of a Mamba2 layer on a GPU, with the default tuning and with others.

    python benchmarks/mamba2_tuning.py --json mamba2_tuning.json        # needs no SGLang, and some minutes

Every tuning changes some of triton.Tuning. One whose results have other bits is red and is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
from typing import Any

from sglang_bcg_fixes.kernels.mamba2_extend import triton
from sglang_bcg_fixes.lab.bench import gdn_layer, mamba2_layer, timing
from sglang_bcg_fixes.lab.bench.rows import GREEN
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.gdn_tuning import AS_IT_IS, compared, with_a_line_for_each_row

CASES = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (8192, 4), (8192, 8), (8192, 64))
CHANGES: tuple[dict[str, int], ...] = (
    {"tile": 128},
    {"tile": 32},
    {"strip": 8},
    {"strip": 32},
    {"side": 16},
    {"prepare_programs": 528},
    {"prepare_programs": 1056},
    {"prepare_warps": 2},
    {"prepare_warps": 8},
    {"advance_stages": 1},
    {"advance_stages": 3},
    {"advance_programs": 132},
    {"advance_programs": 528},
    {"advance_warps": 4},
    {"advance_warps": 8},
    {"part": 32},
    {"part": 32, "advance_stages": 3},
)
# many layers have the times of a few
LAYERS = 8


def case_of(
    tokens: int,
    sequences: int,
    shape: mamba2_layer.Shape,
    device: gdn_layer.Device,
    rounds: int,
    kind: str = "bfloat16",
) -> list[dict[str, Any]]:
    problem = mamba2_layer.Problem(shape, [tokens // sequences] * sequences, device.name, kind)
    chosen = triton.tuning_for(shape.of_kernel)
    made = {AS_IT_IS: functools.partial(mamba2_layer.calls_of_ours, problem, chosen)}
    for change in CHANGES:
        name = ", ".join(f"{field} {value}" for field, value in change.items())
        made[name] = functools.partial(mamba2_layer.calls_of_ours, problem, dataclasses.replace(chosen, **change))
    return [{"tokens": tokens, "sequences": sequences, **row} for row in compared(problem, made, device, rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="nemotron_h_8b,falcon_h1_7b,granite_4_h_small", metavar="A,B")
    parser.add_argument("--rounds", type=int, default=timing.LEAST_ROUNDS)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("mamba2_tuning.json"))
    options = parser.parse_args()
    device, rows = gdn_layer.Cuda(), list[dict[str, Any]]()
    content = {**environment.header(environment.here()), "rounds": options.rounds, "rows": rows}
    for name in options.shapes.split(","):
        shape = dataclasses.replace(mamba2_layer.SHAPES[name], layers=LAYERS)
        for tokens, sequences in CASES:
            rows += [{"shape": name, **row} for row in case_of(tokens, sequences, shape, device, options.rounds)]
            options.json.write_text(with_a_line_for_each_row(content))
            device.release()
    return 0 if all(row["verdict"] == GREEN for row in rows if row["tuning"] == AS_IT_IS) else 1


if __name__ == "__main__":
    sys.exit(main())
