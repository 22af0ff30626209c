# SPDX-License-Identifier: Apache-2.0
"""Times of the two kernels of a Kimi delta attention layer on a GPU, with the default tuning and with others.

    python benchmarks/kda_tuning.py --json kda_tuning.json              # needs no SGLang, and some minutes

Every tuning changes some of triton.Tuning. One whose results have other bits is red and is not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.kda_extend import Shape, triton
from sglang_bcg_fixes.lab.verify import environment

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench.rows import GREEN, RED
from benchmarks.gdn_tuning import ADVANCE, AS_IT_IS, LAYER, PREPARE, say, with_a_line_for_each_row
from benchmarks.kda_extend import SHAPES, Layer
from benchmarks.random_steps import device_us

CASES = ((256, 1), (256, 64), (1024, 1), (8192, 1), (8192, 8), (8192, 64))
CHANGES: tuple[dict[str, Any], ...] = (
    {"prepare_programs": 132},
    {"prepare_programs": 528},
    {"prepare_warps": 4},
    {"prepare_warps": 16},
    {"strip": 4},
    {"strip": 16},
    {"advance_programs": 132},
    {"advance_stages": 1},
    {"advance_stages": 3},
    {"advance_warps": 8},
    {"part": 32},
    {"part": 128, "advance_warps": 8},
)


def results(layer: Layer, pools: Sequence[Any], tuning: triton.Tuning) -> tuple[triton.Call, list[Any]]:
    """Run a call from these pools, and return it with what it wrote."""
    for own, first in zip((layer.conv, layer.state), pools, strict=True):
        own.copy_(first)
    call = layer.call(tuning)
    call.launch()
    return call, [call.output.clone(), layer.conv.clone(), layer.state.clone()]


def case_of(
    tokens: int,
    sequences: int,
    shape: Shape,
    changes: Sequence[dict[str, Any]] = CHANGES,
    kind: Any = torch.bfloat16,
    device: str = "cuda",
    us: Callable[[Callable[[], Any]], float] = device_us,
) -> Iterator[dict[str, Any]]:
    layer, chosen = Layer(tokens, sequences, shape, kind, device), triton.tuning_for(tokens)
    wanted: list[Any] = []
    pools = layer.conv.clone(), layer.state.clone()
    for change in ({}, *changes):
        name = ", ".join(f"{field} {value}" for field, value in change.items()) or AS_IT_IS
        row: dict[str, Any] = {"tokens": tokens, "sequences": sequences, "tuning": name, "verdict": GREEN, "why": ""}
        try:
            call, found = results(layer, pools, dataclasses.replace(chosen, **change))
        except Exception as error:
            # this tuning needs more memory than the GPU has; the others do not depend on it
            yield {**row, "verdict": RED, "why": f"{type(error).__name__}: {error}"[:200]}
            continue
        wanted = wanted or found
        if all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
            parts = {PREPARE: call.prepare, ADVANCE: call.advance, LAYER: call.launch}
            row |= {what: round(us(part), 1) for what, part in parts.items()}
        else:
            row |= {"verdict": RED, "why": "other bits than the tuning as it is"}
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="kimi_linear_48b", metavar="A,B", help="default: %(default)s")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("kda_tuning.json"))
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    content = {**environment.header(environment.here()), "rows": rows}
    for name in options.shapes.split(","):
        for tokens, sequences in CASES:
            for row in case_of(tokens, sequences, SHAPES[name]):
                rows.append({"shape": name, **row})
                say(" ".join(f"{field} {value}" for field, value in rows[-1].items() if value != ""))
            options.json.write_text(with_a_line_for_each_row(content))
    return 0 if all(row["verdict"] == GREEN for row in rows if row["tuning"] == AS_IT_IS) else 1


if __name__ == "__main__":
    sys.exit(main())
