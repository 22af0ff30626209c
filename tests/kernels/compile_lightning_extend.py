# SPDX-License-Identifier: Apache-2.0
"""Lightning attention's kernels compiled for a Hopper GPU that is not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import json
from typing import Any

from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata
from tests.kernels.compile_gdn_extend import FLOAT, HALF, INTEGER, compiled

# of Ling 2.5, whose inputs are fp32, and of MiniCPM-SALA
HEADS = 32
KINDS = (FLOAT, HALF)


def main() -> None:
    found = []
    for kind in KINDS:
        for track in (False, True):
            inner = HEADS * 128
            sizes: dict[str, Any] = {
                **dict.fromkeys(("Q_ROW", "K_ROW", "V_ROW"), inner),
                **{"HEADS": HEADS, "HEAD": 128, "PART": form.TUNING.part, "INNER": inner, "TILE": form.MOST_COLUMNS},
                **{"CHUNK": metadata.CHUNK, "STAGES": form.TUNING.stages, "TRACK": track, "SPLIT": kind == HALF},
            }
            pointers = {
                **dict.fromkeys(("q", "k", "v", "output"), kind),
                **dict.fromkeys(("decay", "state"), FLOAT),
                **dict.fromkeys(("sequences", "chunks", "counts"), INTEGER),
                "scale": "fp32",
            }
            for kernel, fields, options in (
                (
                    form.advance,
                    metadata.SEQUENCE_FIELDS,
                    {"num_warps": form.TUNING.warps, "num_stages": form.TUNING.stages},
                ),
                (form.clear, metadata.CHUNK_FIELDS, {"num_warps": 4, "num_stages": 1}),
            ):
                found.append({**compiled(kernel, sizes | {"FIELDS": fields}, pointers, **options), "kind": kind})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
