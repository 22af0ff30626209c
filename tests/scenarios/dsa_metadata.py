# SPDX-License-Identifier: Apache-2.0
"""The work buffers of aiter's sparse attention, asked for by a decode batch and then by a longer prefill."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch

from cpu_sglang import stand_ins
from tests.scenarios import telling

BACKEND = "sglang.srt.layers.attention.dsa_backend"
BUFFERS = ("work_metadata", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def sizes(batch_size: int, *rest: Any, **more: Any) -> list[tuple[int, torch.dtype]]:
    """Stand in for aiter's own, which has a size and a type for each buffer."""
    return [(16 * batch_size, torch.int32)] * len(BUFFERS)


def main() -> None:
    stand_ins.install()
    module: Any = importlib.import_module(BACKEND)
    module.get_mla_metadata_info_v1 = sizes
    backend = module.DeepseekSparseAttnBackend.__new__(module.DeepseekSparseAttnBackend)
    backend.device, backend.num_head_padded = "cpu", 16
    backend.aiter_dsa_work_metadata, backend.aiter_dsa_metadata_capacity = None, 0

    def buffers(rows: int) -> list[weakref.ref[torch.Tensor]]:
        backend._ensure_aiter_dsa_decode_metadata_buffer(1, rows, torch.bfloat16, torch.float8_e4m3fn)
        return [weakref.ref(getattr(backend, f"aiter_dsa_{name}")) for name in BUFFERS]

    captured = buffers(4)
    again = [buffer() is not None for buffer in captured if buffers(4)]
    replaced = buffers(5)
    telling.result(
        {
            "kept for as many": all(again),
            "kept for more": any(buffer() is not None for buffer in captured),
            "made anew": all(buffer() is not None for buffer in replaced),
        }
    )


if __name__ == "__main__":
    main()
