# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for a Hopper GPU that is not here; run in a process without the interpreter. Prints JSON."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_bcg_fixes.kernels.gdn_extend import triton as implementation
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving

CUOBJDUMP = pathlib.Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HALF, FLOAT, INTEGER = "*bf16", "*fp32", "*i32"
POINTERS = {
    **dict.fromkeys(("x", "a", "b", "weights", "dt_bias", "conv", "queries", "keys"), HALF),
    **dict.fromkeys(("inverses", "scores", "windows", "output"), HALF),
    **dict.fromkeys(("A_log", "decays", "workspace", "state"), FLOAT),
    **dict.fromkeys(("chunks", "counts", "sequences", "of_chunks", "of_sequences", "bounds"), INTEGER),
    **dict.fromkeys(("lengths", "slots", "prefixes"), INTEGER),
    **{"track_mask": "*i1", "track_slots": "*i64", "track_lengths": "*i64", "scale": "fp32"},
}
ALIGNED = ("a_row", "b_row", "dt_row", "conv_slot", "state_slot")
QWEN3_NEXT = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEYS": 128, "VALUES": 128, "CHUNK": metadata.CHUNK}


def compiled(
    kernel: Any, constants: dict[str, Any], pointers: Mapping[str, str] = POINTERS, capability: int = 90, **options: Any
) -> dict[str, Any]:
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if types[name].startswith("*") or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", used)}
    return {
        "name": kernel.__name__,
        "tracks": constants.get("TRACK"),
        "shared": made.metadata.shared,
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        # its left operand in braces is registers, otherwise it is a descriptor
        "wgmma from registers": len(re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{", made.asm["ptx"])),
    }


def main() -> None:
    tuning, found = implementation.Tuning(), []
    for track in (False, True):
        of_tables: dict[str, Any] = {"TRACK": track, "MAX_SEQUENCES": serving.MOST_SEQUENCES, "BOUNDS": 2}
        of_tables |= {"CHUNK": metadata.CHUNK, "ROWS": metadata.ROWS}
        of_tables |= {"CHUNK_FIELDS": metadata.CHUNK_FIELDS, "SEQUENCE_FIELDS": metadata.SEQUENCE_FIELDS}
        if not track:
            of_tables |= dict.fromkeys(("track_mask", "track_slots", "track_lengths"))
        found.append(compiled(metadata._fill, of_tables, num_warps=4))
        of_sequences = {"PART": tuning.part, "FIELDS": metadata.SEQUENCE_FIELDS, "STAGES": tuning.advance_stages}
        for kept in (FLOAT, HALF):
            found.append(
                compiled(
                    implementation.advance,
                    {**QWEN3_NEXT, **of_sequences, "TRACK": track, "OVERLAP": tuning.overlap},
                    {**POINTERS, "state": kept},
                    num_warps=tuning.advance_warps,
                    num_stages=tuning.advance_stages,
                )
            )
    of_chunks = {"WIDTH": 4, "HAS_BIAS": False, "bias": None, "FIELDS": metadata.CHUNK_FIELDS, "STRIP": tuning.strip}
    of_chunks |= {"X_ROW": 8192, "WORKSPACE": 4352, "WINDOW": 1024}
    found.append(
        compiled(
            implementation.prepare,
            {**QWEN3_NEXT, **of_chunks, "TRACK": True, "OVERLAP": tuning.overlap},
            num_warps=tuning.prepare_warps,
            num_stages=1,
            **implementation.registers(tuning.prepare_registers),  # type: ignore[arg-type]
        )
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
