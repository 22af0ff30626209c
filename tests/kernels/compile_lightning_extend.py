# SPDX-License-Identifier: Apache-2.0
"""Lightning attention's kernels compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import generations, metadata
from sglang_bcg_fixes.kernels.linear_extend.walks import Walk
from tests.kernels import covering
from tests.kernels.compile_gdn_extend import FLOAT, HALF, INTEGER, compiled

# of Ling 2.5, whose inputs are fp32, and of MiniCPM-SALA
HEADS = 32
DTYPES = {FLOAT: torch.float32, HALF: torch.bfloat16}


def main() -> None:
    found, table = [], []
    for capability in (90, 100):
        with mock.patch.object(generations, "is_newer_than_hopper", return_value=capability > 90):
            tunings = {kind: form.tuning_for(Shape(HEADS, 128), torch.empty(0, dtype=DTYPES[kind])) for kind in DTYPES}
        for kind, tuning in tunings.items():
            walks = covering.table(walk=(*tuning.few, tuning.many), track=(False, True))
            table += [{"kind": kind, "capability": capability, **row} for row in walks]
            found += [{**each, "kind": kind, "capability": capability} for each in of_chunks(kind, capability)]
    for row in table if "--everything" in sys.argv else covering.rows(table):
        of_row = {name: row[name] for name in ("kind", "capability")}
        found.append({**of_sequences(**row), **of_row})
    print(json.dumps(found))


def sizes_of(kind: str) -> dict[str, Any]:
    inner = HEADS * 128
    return {
        **dict.fromkeys(("Q_ROW", "K_ROW", "V_ROW"), inner),
        **{"HEADS": HEADS, "HEAD": 128, "INNER": inner, "TILE": form.MOST_COLUMNS},
        **{"CHUNK": metadata.CHUNK, "SPLIT": kind == HALF},
    }


def pointers_of(kind: str) -> dict[str, str]:
    return {
        **dict.fromkeys(("q", "k", "v", "near", "output"), kind),
        **dict.fromkeys(("decay", "state"), FLOAT),
        **dict.fromkeys(("sequences", "chunks", "counts"), INTEGER),
        "scale": "fp32",
    }


def of_chunks(kind: str, capability: int) -> Iterator[dict[str, Any]]:
    sizes = {**sizes_of(kind), "FIELDS": metadata.CHUNK_FIELDS}
    for kernel in (form.relate, form.clear):
        yield compiled(kernel, sizes, pointers_of(kind), capability, num_warps=4, num_stages=1)


def of_sequences(kind: str, capability: int, walk: Walk, track: bool) -> dict[str, Any]:
    sizes = {**sizes_of(kind), "FIELDS": metadata.SEQUENCE_FIELDS, "PART": walk.part, "STAGES": walk.stages}
    launched = {"num_warps": walk.warps, "num_stages": walk.stages}
    made = compiled(form.advance, {**sizes, "TRACK": track}, pointers_of(kind), capability, **launched)
    return {**made, "part": walk.part}


if __name__ == "__main__":
    main()
