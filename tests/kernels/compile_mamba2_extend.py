# SPDX-License-Identifier: Apache-2.0
"""Mamba2's kernels compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape
from sglang_bcg_fixes.kernels.mamba2_extend import triton as implementation
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from tests.kernels import covering
from tests.kernels.compile_gdn_extend import FLOAT, HALF, INTEGER, compiled

POINTERS = {
    **dict.fromkeys(("x", "dt", "weights", "bias", "conv", "mixed", "windows", "output"), HALF),
    **dict.fromkeys(("A", "D", "dt_bias", "gates", "near"), FLOAT),
    **dict.fromkeys(("chunks", "counts", "sequences"), INTEGER),
    **dict.fromkeys(("least_step", "most_step"), "fp32"),
}
# by the dtype of states: Nemotron-H-8B, Nemotron-Nano-9B-v2, Falcon-H1-34B
LAYERS = (
    (Shape(128, 8, 64, 128, 4), FLOAT),
    (Shape(128, 8, 64, 128, 4), HALF),
    (Shape(128, 8, 80, 128, 4), FLOAT),
    (Shape(32, 2, 128, 256, 4), FLOAT),
    (Shape(32, 2, 128, 64, 4), FLOAT),
)
# of Blackwell one layer: what is another there is one operation
TARGETS = (*((layer, 90) for layer in LAYERS), (LAYERS[0], 100))


def main() -> None:
    of_tokens: list[dict[str, Any]] = []
    of_walks: list[dict[str, Any]] = []
    found = []
    for (shape, kept), capability in TARGETS:
        tuning = implementation.tuning_for(shape)
        for track in (False, True):
            row = {"shape": shape, "capability": capability, "track": track}
            # it knows no states
            of_tokens += [{**row, "tile": implementation.tile_of(shape, tuning)}] if (shape, kept) != LAYERS[1] else []
            of_layer = {"states": shape.states, "head": shape.head, "kept": kept}
            of_walks += [{**row, **of_layer, "walk": walk} for walk in (*tuning.few, tuning.many)]
        if tuning.relates:
            found.append({**relate(shape, capability), "capability": capability, "states": shape.states})
    if "--everything" not in sys.argv:
        # the code differs by the tile; other sizes of a shape are numbers in it
        of_tokens = covering.rows(of_tokens, alone=["shape"])
        of_walks = covering.rows(of_walks, alone=["shape"])
    found += [{**prepare(row), "capability": row["capability"], "states": row["shape"].states} for row in of_tokens]
    found += [{**advance(row), "capability": row["capability"], "states": row["shape"].states} for row in of_walks]
    print(json.dumps(found))


def prepare(row: Mapping[str, Any]) -> dict[str, Any]:
    shape: Shape = row["shape"]
    tuning = implementation.tuning_for(shape)
    sizes = {
        "HEADS": shape.heads,
        "STATES": shape.states,
        "CHUNK": metadata.CHUNK,
        "TRACK": row["track"],
        "X_ROW": 2 * shape.inner + 2 * shape.groups * shape.states + shape.heads,
        "INNER": shape.inner,
        "CHANNELS": shape.channels,
        "WIDTH": shape.width,
        "HAS_BIAS": True,
        "STRIP": tuning.strip,
        "TILE": row["tile"],
        "SIDE": tuning.side,
        "FIELDS": metadata.CHUNK_FIELDS,
    }
    launched = {"num_warps": tuning.prepare_warps, "num_stages": 1}
    return compiled(implementation.prepare, sizes, POINTERS, row["capability"], **launched)


def relate(shape: Shape, capability: int) -> dict[str, Any]:
    sizes = {"GROUPS": shape.groups, "STATES": shape.states, "CHUNK": metadata.CHUNK, "FIELDS": metadata.CHUNK_FIELDS}
    return compiled(implementation.relate, sizes, POINTERS, capability, num_warps=4, num_stages=1)


def advance(row: Mapping[str, Any]) -> dict[str, Any]:
    shape: Shape = row["shape"]
    walk: Walk = row["walk"]
    sizes = {
        "HEADS": shape.heads,
        "STATES": shape.states,
        "CHUNK": metadata.CHUNK,
        "TRACK": row["track"],
        "GROUPS": shape.groups,
        "HEAD": shape.head,
        "PART": walk.part_of(shape),
        "FIELDS": metadata.SEQUENCE_FIELDS,
        "STAGES": walk.stages,
        "RELATED": implementation.tuning_for(shape).relates,
        "ADD_BEHIND": row["capability"] > 90,
    }
    pointers = {**POINTERS, "state": row["kept"]}
    launched = {"num_warps": walk.warps, "num_stages": walk.stages}
    made = compiled(implementation.advance, sizes, pointers, row["capability"], **launched)
    return {**made, "part": walk.part_of(shape)}


if __name__ == "__main__":
    main()
