# SPDX-License-Identifier: Apache-2.0
"""Tokens that a rank stores with decode context parallelism, as Triton's backend has it in a break."""

from __future__ import annotations

import types
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import padded_break, telling

ROWS, REAL, SIZE, RANKS = 8, 5, 4, 2


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    from sglang.srt.layers import radix_attention
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    batch = types.SimpleNamespace(
        num_token_non_padded_cpu=REAL, positions=torch.arange(ROWS), dcp_kv_mask=None, out_cache_loc=torch.arange(ROWS)
    )
    padded_break.enter(radix_attention, batch, ROWS, REAL)
    stored = []

    def store(layer: Any, slots: Any, keys: Any, values: Any, *scales: Any, dcp_kv_mask: Any) -> None:
        stored.append(dcp_kv_mask)

    def attend(query: Any, key: Any, value: Any, layer: Any, forward_batch: Any, *rest: Any, **options: Any) -> Any:
        pool = types.SimpleNamespace(set_kv_buffer=store)
        rank = types.SimpleNamespace(dcp_size=RANKS, dcp_rank=1, token_to_kv_pool=pool)
        TritonAttnBackend._set_kv_buffer(rank, forward_batch, layer, forward_batch.out_cache_loc, key, value)
        return query + 1

    radix_attention.get_attn_backend = lambda: types.SimpleNamespace(forward=attend)

    def own_tokens() -> list[Any]:
        rows = torch.zeros(ROWS, SIZE)
        radix_attention.breakable_unified_attention_with_output(rows, rows, rows, torch.zeros(ROWS, SIZE), True, 0)
        mask = stored.pop()
        return [None if mask is None else mask.tolist(), len(batch.positions)]

    telling.with_and_without(own_tokens)


if __name__ == "__main__":
    main()
