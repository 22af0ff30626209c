# SPDX-License-Identifier: Apache-2.0
"""Times of the two kernels of a gated delta net layer on a GPU, with the default tuning and with others.

    python benchmarks/gdn_tuning.py --json gdn_tuning-cuda.json                 # needs no SGLang
    python benchmarks/gdn_tuning.py --form triton --json gdn_tuning.json        # some minutes
    python benchmarks/gdn_tuning.py --states bfloat16 --json gdn_tuning-bfloat16.json
    python benchmarks/gdn_tuning.py --once advance --tokens 16384               # for a profiler: one launch, no times

Every tuning changes some of triton.Tuning, which the CUDA implementation ignores; one whose results have other bits is
red and is not timed. The last two have the tuning that a graph of that size is captured with, the second with tables
for only as many sequences as there are: the difference is the cost of padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend.triton import Tuning, tuning_for
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import gdn_layer, timing
from benchmarks.bench.rows import GREEN, RED
from tests.kernels import accuracy

CASES = (
    (256, 1),
    (256, 16),
    (256, 64),
    (1024, 1),
    (1024, 64),
    (4096, 1),
    (8192, 1),
    (8192, 8),
    (16384, 1),
    (16384, 16),
)
AS_IT_IS, CHOSEN, FEW_TABLES = "as it is", "chosen", "chosen, tables for these sequences only"
CHANGES: tuple[dict[str, Any], ...] = (
    {"prepare_registers": None},
    {"prepare_registers": 128},
    {"prepare_registers": 224},
    {"prepare_registers": None, "prepare_programs": 264},
    {"prepare_registers": 128, "prepare_programs": 528},
    {"strip": 4},
    {"prepare_warps": 8},
    {"advance_stages": 1},
    {"advance_stages": 1, "advance_programs": 264},
    {"advance_stages": 1, "advance_programs": 396},
    {"advance_stages": 2},
    {"advance_stages": 2, "advance_programs": 264},
    {"advance_stages": 4},
    {"prepare_registers": None, "advance_stages": 1, "advance_programs": 264},
    {"prepare_registers": None, "advance_stages": 2, "advance_programs": 264},
    {"advance_warps": 8},
    {"part": 32, "advance_stages": 2, "advance_programs": 264},
    {"part": 128, "advance_warps": 8},
    {"overlap": True},
)
PREPARE, ADVANCE, LAYER = "prepare_us", "advance_us", "layer_us"


def arms(tokens: int, implementation: str) -> Iterator[tuple[str, Tuning, bool]]:
    """Name of a tuning, and whether its tables have room for many more sequences."""
    yield AS_IT_IS, Tuning(), True
    for change in CHANGES if implementation == gdn_layer.TRITON else ():
        name = ", ".join(f"{field} {value}" for field, value in change.items())
        yield name, dataclasses.replace(Tuning(), **change), True
    yield CHOSEN, tuning_for(tokens), True
    yield FEW_TABLES, tuning_for(tokens), False


@dataclasses.dataclass
class Arm:
    """One tuning of one case: every layer prepared, every layer advanced, and one after the other, in graphs."""

    name: str
    why: str = ""
    prepared: Callable[[], object] | None = None
    advanced: Callable[[], object] | None = None
    whole: Callable[[], object] | None = None
    # keeps the memory that the graphs read
    calls: Sequence[Any] = ()

    def timed(self, device: gdn_layer.Device, layers: int) -> timing.Sample:
        graphs = {PREPARE: self.prepared, ADVANCE: self.advanced, LAYER: self.whole}
        return {what: 1e6 * device.seconds(graph) / layers for what, graph in graphs.items() if graph}


def build(name: str, call_of: Callable[[int], Any], problem: Any, device: gdn_layer.Device) -> Arm:
    calls = [call_of(number) for number in range(problem.layers)]

    def spans(each: str) -> None:
        for call in calls:
            for span in range(call.spans):
                getattr(call, each)(span)

    def step() -> None:
        for call in calls:
            call.launch()

    # compiles
    step()
    device.synchronize()
    works = (lambda: spans("prepare"), lambda: spans("advance"), step)
    prepared, advanced, whole = (device.capture(work) for work in works)
    return Arm(name, "", prepared, advanced, whole, calls)


def results(arm: Arm, problem: Any, device: gdn_layer.Device) -> list[torch.Tensor]:
    assert arm.whole
    problem.restore()
    arm.whole()
    device.synchronize()
    return [problem.output.clone(), problem.conv[-1, 1:].clone(), problem.state[-1, 1:].clone()]


def case_of(
    tokens: int,
    sequences: int,
    shape: gdn_layer.Shape,
    device: gdn_layer.Device,
    rounds: int,
    implementation: str = gdn_layer.TRITON,
    states: str = gdn_layer.STATES[0],
) -> list[Any]:
    problem = gdn_layer.Problem(shape, [tokens // sequences] * sequences, device.name, states=states)

    def call_of(tuning: Tuning, many: bool) -> Callable[[int], Any]:
        return gdn_layer.calls_of_ours(
            problem, implementation, tuning, gdn_layer.CAPTURED_SEQUENCES if many else sequences
        )

    made = {name: functools.partial(call_of, tuning, many) for name, tuning, many in arms(tokens, implementation)}
    return [{"tokens": tokens, "sequences": sequences, **row} for row in compared(problem, made, device, rounds)]


def compared(
    problem: Any, made: Mapping[str, Callable[[], Callable[[int], Any]]], device: gdn_layer.Device, rounds: int
) -> list[dict[str, Any]]:
    """Time every tuning that has the bits of the first, which must be right."""
    problem.restore()
    found: list[Arm] = []
    wanted: list[torch.Tensor] = []
    for name, make in made.items():
        try:
            arm = build(name, make(), problem, device)
            got = results(arm, problem, device)
        except Exception as error:
            # this tuning needs more memory than the GPU has; the others do not depend on it
            found.append(Arm(name, f"{type(error).__name__}: {error}"[:200]))
            continue
        if not wanted:
            wanted = got
            errors = accuracy.errors(problem.results(problem.layers - 1), problem.wanted())
            arm.why = accuracy.why_wrong(errors, None)
        elif not all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)):
            arm.why = "other bits than the tuning as it is"
        found.append(arm)
    right = {arm.name: arm for arm in found if not arm.why}
    samples = timing.in_turn(
        {name: lambda arm=arm: arm.timed(device, problem.layers) for name, arm in right.items()},  # type: ignore[misc]
        rounds,
    )
    rows = []
    for arm in found:
        row: dict[str, Any] = {"tuning": arm.name, "verdict": RED if arm.why else GREEN, "why": arm.why}
        if arm.name in samples:
            row |= {what: spread.median for what, spread in timing.spreads(samples[arm.name]).items()}
        rows.append(row)
        say(" ".join(f"{name} {value}" for name, value in row.items() if value != ""))
    return rows


def once(kernel: str, tokens: int, sequences: int, shape: gdn_layer.Shape, implementation: str) -> None:
    """Compile everything first, so a profiler can take the last launch of the kernel."""
    problem = gdn_layer.Problem(dataclasses.replace(shape, layers=1), [tokens // sequences] * sequences, "cuda")
    problem.restore()
    call = gdn_layer.calls_of_ours(problem, implementation)(0)
    call.launch()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    getattr(call, kernel)(0)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=gdn_layer.SHAPES, default="qwen3_next")
    parser.add_argument(
        "--form", dest="implementation", choices=(gdn_layer.TRITON, gdn_layer.CUDA), default=gdn_layer.CUDA
    )
    parser.add_argument("--states", choices=gdn_layer.STATES, default=gdn_layer.STATES[0])
    parser.add_argument("--rounds", type=int, default=timing.LEAST_ROUNDS)
    parser.add_argument("--once", choices=("prepare", "advance"), help="profile this one between start and stop")
    parser.add_argument("--tokens", type=int, default=16384, help="of --once (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=1, help="of --once (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gdn_tuning.json"))
    options = parser.parse_args()
    shape = gdn_layer.SHAPES[options.shape]
    if options.once:
        once(options.once, options.tokens, options.sequences, shape, options.implementation)
        return 0
    device, rows = gdn_layer.Cuda(), list[dict[str, Any]]()
    content = {
        **environment.header(environment.here()),
        "shape": options.shape,
        "form": options.implementation,
        "states": options.states,
    }
    content |= {"rounds": options.rounds, "rows": rows}
    for tokens, sequences in CASES:
        rows += case_of(tokens, sequences, shape, device, options.rounds, options.implementation, options.states)
        device.release()
        # write early, so an interrupted run leaves results
        options.json.write_text(with_a_line_for_each_row(content))
    return 0 if all(row["verdict"] == GREEN for row in rows if row["tuning"] in (AS_IT_IS, CHOSEN, FEW_TABLES)) else 1


def with_a_line_for_each_row(content: dict[str, Any]) -> str:
    head = {name: value for name, value in content.items() if name != "rows"}
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n'


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
