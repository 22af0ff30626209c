# SPDX-License-Identifier: Apache-2.0
"""Lightning attention's kernels compiled for GPUs that are not here, without the interpreter. Prints JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import generations, metadata
from tests.kernels.compile_gdn_extend import FLOAT, HALF, INTEGER, compiled

# of Ling 2.5, whose inputs are fp32, and of MiniCPM-SALA
HEADS = 32
DTYPES = {FLOAT: torch.float32, HALF: torch.bfloat16}


def main() -> None:
    found = []
    for capability in (90, 100):
        with mock.patch.object(generations, "is_newer_than_hopper", return_value=capability > 90):
            tunings = {kind: form.tuning_for(Shape(HEADS, 128), torch.empty(0, dtype=DTYPES[kind])) for kind in DTYPES}
        for (kind, tuning), track in itertools.product(tunings.items(), (False, True)):
            made = kernels(tuning, kind, track, capability)
            found += [{**each, "kind": kind, "capability": capability} for each in made]
    print(json.dumps(found))


def kernels(tuning: form.Tuning, kind: str, track: bool, capability: int) -> Iterator[dict[str, Any]]:
    inner = HEADS * 128
    sizes: dict[str, Any] = {
        **dict.fromkeys(("Q_ROW", "K_ROW", "V_ROW"), inner),
        **{"HEADS": HEADS, "HEAD": 128, "INNER": inner, "TILE": form.MOST_COLUMNS},
        **{"CHUNK": metadata.CHUNK, "TRACK": track, "SPLIT": kind == HALF},
    }
    pointers = {
        **dict.fromkeys(("q", "k", "v", "near", "output"), kind),
        **dict.fromkeys(("decay", "state"), FLOAT),
        **dict.fromkeys(("sequences", "chunks", "counts"), INTEGER),
        "scale": "fp32",
    }
    for kernel in (form.relate, form.clear):
        of_chunks = {"FIELDS": metadata.CHUNK_FIELDS}
        yield compiled(kernel, sizes | of_chunks, pointers, capability, num_warps=4, num_stages=1)
    for walk in (*tuning.few, tuning.many):
        of_sequences = {"FIELDS": metadata.SEQUENCE_FIELDS, "PART": walk.part, "STAGES": walk.stages}
        launched = {"num_warps": walk.warps, "num_stages": walk.stages}
        yield {**compiled(form.advance, sizes | of_sequences, pointers, capability, **launched), "part": walk.part}


if __name__ == "__main__":
    main()
