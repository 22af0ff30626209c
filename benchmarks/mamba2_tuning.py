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

from sglang_bcg_fixes.kernels.mamba2_extend import Shape, triton
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import gdn_layer, mamba2_layer, timing
from benchmarks.bench.rows import GREEN
from benchmarks.gdn_tuning import AS_IT_IS, compared, with_a_line_for_each_row

CASES = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (8192, 4), (8192, 8), (8192, 64))
FEW, MANY = "few", "many"
# changes of `prepare`, of every walk of `advance` with few sequences, or of that with many; without a walk for few,
# every step is one of many
CHANGES: tuple[dict[str, Any], ...] = (
    {"tile": 64, "side": 8},
    {"tile": 128, "side": 16},
    {"prepare_programs": 1056},
    {"prepare_warps": 2},
    {"relates": False},
    {"relates": True},
    {FEW: ()},
    {FEW: {"part": 16}},
    {FEW: {"part": 32}},
    {FEW: {"part": 64}},
    {FEW: {"warps": 8}},
    {FEW: {"stages": 2}},
    {FEW: {"stages": 4}},
    {MANY: {"stages": 1}},
    {MANY: {"stages": 3}},
    {MANY: {"programs": 528}},
    {MANY: {"warps": 4}},
    {MANY: {"warps": 8}},
    {MANY: {"part": 32}},
)
# many layers have the times of a few
LAYERS = 8


def changed(chosen: triton.Tuning, change: dict[str, Any], shape: Shape) -> triton.Tuning:
    def walks(name: str, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if name == MANY:
            return dataclasses.replace(chosen.many, **values)
        every = {dataclasses.replace(walk, **values): None for walk in chosen.few}
        return tuple(walk for walk in every if walk.most_sequences(shape))

    return dataclasses.replace(chosen, **{name: walks(name, values) for name, values in change.items()})


def name_of(change: dict[str, Any]) -> str:
    def words(values: Any) -> str:
        return " ".join(f"{field} {value}" for field, value in values.items()) if isinstance(values, dict) else values

    return ", ".join(f"{name} {'none' if values == () else words(values)}" for name, values in change.items())


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
    made = {AS_IT_IS: functools.partial(mamba2_layer.calls_of_ours, problem, tuning=chosen)}
    for change in CHANGES:
        made[name_of(change)] = functools.partial(
            mamba2_layer.calls_of_ours, problem, tuning=changed(chosen, change, shape.of_kernel)
        )
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
