# SPDX-License-Identifier: Apache-2.0
"""The halves of a batch in a real sliding window pool."""

from __future__ import annotations

import types
from typing import Any

import torch

from cpu_sglang import stand_ins
from sglang_bcg_fixes.fixes import swa_slots_of_whole_batch
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(swa_slots_of_whole_batch)

LAYER, SLOTS = types.SimpleNamespace(layer_id=0), torch.tensor([3, 4, 5, 6, 7])


def main() -> None:
    stand_ins.install()
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(
        size=16,
        size_swa=16,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=4,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        enable_kvcache_transpose=False,
        device="cpu",
    )
    pool.full_to_swa_index_mapping = torch.arange(17).flip(0)
    pool.set_swa_loc(pool.translate_loc_from_full_to_swa(SLOTS))
    keys, _ = pool.get_kv_buffer(0)

    def store(*parts: slice) -> Any:
        keys.zero_()
        try:
            for part in parts:
                rows = SLOTS[part].view(-1, 1, 1).expand(-1, 1, 4).float()
                pool.set_kv_buffer(LAYER, SLOTS[part], rows, rows)
        except Exception as error:
            return str(error).partition(":")[0]
        return keys[:, 0, 0].tolist()

    def look() -> dict[str, Any]:
        whole, halves = store(slice(None)), store(slice(0, 2), slice(2, 5))
        return {"whole": whole, "halves": halves, "kept": pool.swa_loc.tolist()}

    telling.before_and_after(FIX, look)


if __name__ == "__main__":
    main()
