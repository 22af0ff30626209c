# SPDX-License-Identifier: Apache-2.0
"""The short convolution's kernel compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.short_conv_extend import Shape
from sglang_bcg_fixes.kernels.short_conv_extend import triton as implementation
from tests.kernels import covering
from tests.kernels.compile_gdn_extend import HALF, INTEGER, compiled

POINTERS = {
    **dict.fromkeys(("x", "weights", "bias", "conv", "windows", "output"), HALF),
    **dict.fromkeys(("chunks", "counts"), INTEGER),
}
# LFM2-350M, -700M, -1.2B and -8B-A1B, one of eight ranks, and a wider one
SHAPES = (Shape(1024, 3), Shape(1536, 3), Shape(2048, 3), Shape(256, 3), Shape(2048, 4))


def main() -> None:
    # two values of a shape's size meet where a shape has both
    table = [
        {**dataclasses.asdict(shape), "capability": capability, "has_bias": has_bias}
        for shape in SHAPES
        for capability in (90, 100)
        for has_bias in (False, True)
    ]
    found = []
    for row in table if "--everything" in sys.argv else covering.rows(table):
        found.append({**kernel(**row), "capability": row["capability"]})
    print(json.dumps(found))


def kernel(channels: int, width: int, capability: int, has_bias: bool) -> dict[str, Any]:
    shape = Shape(channels, width)
    tuning = implementation.tuning_for(shape)
    sizes: dict[str, int | bool | None] = {
        "X_ROW": shape.channels,
        "CHANNELS": shape.channels,
        "WIDTH": shape.width,
        "HAS_BIAS": has_bias,
        "CHUNK": metadata.CHUNK,
        "STRIP": tuning.strip,
        "TILE": implementation.tile_of(shape, tuning),
        "FIELDS": metadata.CHUNK_FIELDS,
    }
    # a layer without bias gives none
    sizes |= {} if has_bias else {"bias": None}
    return compiled(implementation.convolve, sizes, POINTERS, capability, num_warps=tuning.warps, num_stages=1)


if __name__ == "__main__":
    main()
