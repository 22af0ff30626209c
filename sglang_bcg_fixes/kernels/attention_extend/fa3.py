# SPDX-License-Identifier: Apache-2.0
"""SGLang's own FlashAttention-3 call with static metadata: what a captured attention layer reads.

The rows behind the last token of a batch are one more request without keys, for which FlashAttention writes zeros. So a
graph leaves in its padding what SGLang's break leaves there.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_bcg_fixes.model import Accepted, Rejected

Tensor = torch.Tensor

# in one batch; each costs every launch a block, and the combination of split keys a row of blocks
REQUESTS = 3
# as many multiprocessors as the rule is asked for where there is no GPU
ON_THE_HOST = 132
HOPPER = (9, 0)


def ready(device: int) -> Accepted | Rejected:
    found = torch.cuda.get_device_capability(device)
    return Accepted() if found == HOPPER else Rejected(f"sm_{found[0]}{found[1]} has no FlashAttention-3")


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ON_THE_HOST
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Tables:
    """Static tables of up to REQUESTS requests and of their padding."""

    def __init__(self, metadata: Any, pages: int, rows: int, device: torch.device) -> None:
        """`metadata` is SGLang's of a batch: it shows which fields this server has."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slots = REQUESTS + 1
        self.pages = pages
        self._sizes = zeros(2 * slots + 1)
        self.lengths, self.starts = self._sizes[:slots], self._sizes[slots:]
        # by rows: the sizes of a batch without requests
        self._empty: dict[int, Tensor] = {}
        self.table = zeros(slots, pages)
        has_window = metadata.swa_page_table is not None
        self.window_table = zeros(slots, pages) if has_window else None
        has_slots = getattr(metadata, "swa_out_cache_loc", None) is not None
        self.window_slots = zeros(rows, dtype=torch.int64) if has_slots else None
        self.metadata = type(metadata)()
        self.metadata.cache_seqlens_int32, self.metadata.cu_seqlens_q = self.lengths, self.starts
        self.metadata.page_table, self.metadata.swa_page_table = self.table, self.window_table

    def for_rows(self, rows: int) -> Any:
        """Return the metadata that a layer is captured with."""
        self.metadata.max_seq_len_q = rows
        if self.window_slots is not None:
            self.metadata.swa_out_cache_loc = self.window_slots[:rows]
        return self.metadata

    def clear(self, rows: int) -> None:
        """Fill for a batch without requests, all of whose rows are padding."""
        if rows not in self._empty:
            empty = torch.zeros_like(self._sizes)
            empty[REQUESTS + 2 :] = rows
            self._empty[rows] = empty
        self._sizes.copy_(self._empty[rows])

    def fill(self, metadata: Any, rows: int) -> None:
        """Fill from what SGLang prepared for a batch, in a graph of so many rows."""
        self.clear(rows)
        requests = len(metadata.cache_seqlens_int32)
        sizes = [metadata.cache_seqlens_int32, metadata.cu_seqlens_q]
        torch._foreach_copy_([self.lengths[:requests], self.starts[: requests + 1]], sizes)
        self.table[:requests, : metadata.page_table.shape[1]].copy_(metadata.page_table)
        if self.window_table is not None:
            self.window_table[:requests, : metadata.swa_page_table.shape[1]].copy_(metadata.swa_page_table)
        if self.window_slots is not None:
            slots = metadata.swa_out_cache_loc
            self.window_slots[len(slots) : rows].zero_()
            self.window_slots[: len(slots)].copy_(slots)
