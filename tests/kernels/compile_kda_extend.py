# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention's kernels compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from sglang_bcg_fixes.kernels.kda_extend import Shape
from sglang_bcg_fixes.kernels.kda_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import delta_rule, metadata
from tests.kernels import covering
from tests.kernels.compile_gdn_extend import FLOAT, HALF, INTEGER, compiled

POINTERS = {
    **dict.fromkeys(("x", "a", "conv", "queries", "keys", "last_keys", "inverses", "scores"), HALF),
    **dict.fromkeys(("windows", "output"), HALF),
    **dict.fromkeys(("b", "weights", "A_log", "dt_bias", "decays", "workspace"), FLOAT),
    **dict.fromkeys(("chunks", "counts", "sequences"), INTEGER),
    **dict.fromkeys(("scale", "lower_bound"), "fp32"),
}
# by the dtype of states: Kimi-Linear-48B-A3B, and one of the eight ranks of Kimi K3, whose gates have a lower bound
LAYERS = ((Shape(32, 128, 128, 4), FLOAT), (Shape(12, 128, 128, 4, lower_bound=-5.0), HALF))
CAPABILITIES = (90, 100)


def main() -> None:
    table = covering.table(layer=LAYERS, capability=CAPABILITIES, track=(False, True))
    found = []
    for row in table if "--everything" in sys.argv else covering.rows(table):
        found += [{**each, "capability": row["capability"]} for each in kernels(**row)]
    print(json.dumps(found))


def kernels(layer: tuple[Shape, str], capability: int, track: bool) -> Iterator[dict[str, Any]]:
    (shape, kept), tuning = layer, implementation.Tuning()
    pointers = {**POINTERS, "state": kept}
    sizes: dict[str, Any] = {"HEADS": shape.heads, "KEYS": shape.keys, "VALUES": shape.values}
    sizes |= {"CHUNK": metadata.CHUNK, "TRACK": track}
    of_chunks = {
        "X_ROW": shape.channels + shape.heads + 2 * shape.keys,
        "WIDTH": shape.width,
        "HAS_BIAS": False,
        "bias": None,
        "HAS_LOWER_BOUND": shape.lower_bound is not None,
        "IS_SQUASHED": shape.lower_bound is None,
        "LEVELS": implementation.levels_of(metadata.CHUNK),
        "STRIP": tuning.strip,
        "FIELDS": metadata.CHUNK_FIELDS,
        "WORKSPACE": metadata.CHUNK * (2 * delta_rule.BLOCK.value + shape.keys),
        "WINDOW": 8 * shape.keys,
    }
    launched = {"num_warps": tuning.prepare_warps, "num_stages": 1}
    yield compiled(implementation.prepare, sizes | of_chunks, pointers, capability, **launched)
    of_sequences = {"PART": tuning.part, "FIELDS": metadata.SEQUENCE_FIELDS, "STAGES": tuning.advance_stages}
    launched = {"num_warps": tuning.advance_warps, "num_stages": tuning.advance_stages}
    yield compiled(implementation.advance, sizes | of_sequences, pointers, capability, **launched)


if __name__ == "__main__":
    main()
