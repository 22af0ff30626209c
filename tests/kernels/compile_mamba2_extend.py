# SPDX-License-Identifier: Apache-2.0
"""Mamba2's kernels compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import json
from typing import Any

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape
from sglang_bcg_fixes.kernels.mamba2_extend import triton as form
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
    found = []
    for (shape, kept), capability in TARGETS:
        tuning = form.tuning_for(shape)
        for track in (False, True):
            sizes: dict[str, Any] = {
                "HEADS": shape.heads,
                "STATES": shape.states,
                "CHUNK": metadata.CHUNK,
                "TRACK": track,
            }
            of_chunks = {
                "X_ROW": 2 * shape.inner + 2 * shape.groups * shape.states + shape.heads,
                "INNER": shape.inner,
                "CHANNELS": shape.channels,
                "WIDTH": shape.width,
                "HAS_BIAS": True,
                "STRIP": tuning.strip,
                "TILE": form.tile_of(shape, tuning),
                "SIDE": tuning.side,
                "FIELDS": metadata.CHUNK_FIELDS,
            }
            pointers = {**POINTERS, "state": kept}
            launched = {"num_warps": tuning.prepare_warps, "num_stages": 1}
            made = [compiled(form.prepare, sizes | of_chunks, pointers, capability, **launched)]
            if tuning.relates:
                of_groups = {"GROUPS": shape.groups, "FIELDS": metadata.CHUNK_FIELDS}
                launched = {"num_warps": 4, "num_stages": 1}
                made.append(compiled(form.relate, sizes | of_groups, pointers, capability, **launched))
            for walk in (*tuning.few, tuning.many):
                of_sequences = {
                    "GROUPS": shape.groups,
                    "HEAD": shape.head,
                    "PART": walk.part_of(shape),
                    "FIELDS": metadata.SEQUENCE_FIELDS,
                    "STAGES": walk.stages,
                    "RELATED": tuning.relates,
                    "ADD_BEHIND": capability > 90,
                }
                launched = {"num_warps": walk.warps, "num_stages": walk.stages}
                advance = compiled(form.advance, sizes | of_sequences, pointers, capability, **launched)
                made.append({**advance, "part": walk.part_of(shape)})
            found += [{**each, "capability": capability, "states": shape.states} for each in made]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
