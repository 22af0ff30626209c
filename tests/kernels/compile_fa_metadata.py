# SPDX-License-Identifier: Apache-2.0
"""The Triton implementation's kernels, compiled for GPUs that are not here, in a process without the interpreter."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_bcg_fixes.kernels.fa_metadata import triton as implementation

ARCHITECTURES = (80, 90, 100)
# what is no 32-bit integer; either width of lengths and indices
POINTERS = {
    "req_to_token": "*i32",
    "cache_seqlens": "*i32",
    "seqused": "*i32",
    "cu_seqlens": "*i32",
    "cu_seqlens_k": "*i32",
    "cu_seqlens_q": "*i32",
    "page_table": "*i32",
    "swa_page_table": "*i32",
    "block_table": "*i32",
    "counts": "*i32",
    "sums": "*i32",
    "mapping": "*i64",
    "swa_out_cache_loc": "*i64",
    "custom_mask": "*u8",
}
INDICES = ("seq_lens", "req_pool_indices", "extend_lens", "row_start", "out_cache_loc")
WIDE = {"WIDE_IN": 4, "WIDE_OUT": 4, "WIDE_SWA": 4}


def compiled(launcher: Any, architecture: int, index: str, constants: dict[str, Any]) -> str:
    """The assembler's input; ptxas has taken it too."""
    kernel = launcher.kernel
    types, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constants else index if name in INDICES else POINTERS.get(name, "i32")
        if name in ("req_to_token", "page_table", "swa_page_table", "block_table"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=values, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    text: str = triton.compile(source, target=target, options={"num_warps": implementation.WARPS}).asm["ptx"]
    return text


def fa_metadata(architecture: int, index: str, page_size: int, everything: bool) -> str:
    absent = () if everything else ("swa_page_table", "mapping", "out_cache_loc", "swa_out_cache_loc", "extend_lens")
    constants: dict[str, Any] = {
        name: None for name in (*absent, *(() if everything else ("cu_seqlens_q", "row_start")))
    }
    constants |= {"SHIFT": page_size.bit_length() - 1, "DROP_LAST": everything, "ZERO_TAIL": everything, **WIDE}
    constants |= {
        "COLUMNS": implementation.columns_at_a_time(page_size),
        "LENGTHS": implementation.LENGTHS,
        "LOCATIONS": implementation.LOCATIONS,
    }
    return compiled(implementation.fa_metadata_kernel, architecture, index, constants)


def main() -> None:
    for architecture in ARCHITECTURES:
        copied = fa_metadata(architecture, "*i64", 1, everything=False)
        assert re.search(r"ld\.global\S*\.v4\.\w*32", copied), copied
        assert re.search(r"st\.global\S*\.v4\.\w*32", copied), copied
        fa_metadata(architecture, "*i32", 64, everything=True)
        index, tile = "*i32", {"ROWS": 256, "STEPS": 8}
        compiled(implementation.draft_expand_kernel, architecture, index, {"SHIFT": 4, "ZERO_TAIL": True, **tile})
        compiled(implementation.verify_expand_kernel, architecture, index, {"ROWS": 256, "TOKENS": 8})
        compiled(implementation.sums_kernel, architecture, index, {"LENGTHS": 4 * implementation.LENGTHS})
        constants = {"SHIFT": 4, "ZERO_TAIL": False, "COLUMNS": implementation.COLUMNS_OF_PAGES, "WIDE_OUT": 4}
        compiled(implementation.local_attention_kernel, architecture, index, constants)
        compiled(implementation.local_attention_kernel, architecture, index, constants | {"mapping": None})
    print("all wide")


if __name__ == "__main__":
    main()
