# SPDX-License-Identifier: Apache-2.0
"""Decode batches that are padded to a captured size, in the real buffers and the real KV pool of 0.5.11 to 0.5.12."""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.releases.decode_buffers import breakable_runner_shares, buffers, fill
from tests.scenarios import named, plugins


def rows() -> dict[str, Any]:
    plugins.load()
    shared = buffers()
    fill(shared, [1, 2, 3, 4], [5, 6, 7, 8])
    whole = [shared.req_pool_indices.tolist(), shared.out_cache_loc_swa.tolist()]
    fill(shared, [1, 2, 3], [5, 6, 7])
    return {"whole": whole, "rows": shared.req_pool_indices.tolist(), "slots": shared.out_cache_loc_swa.tolist()}


def slots() -> dict[str, Any]:
    """Store in a padded replay, when request four has left the batch and another one has its slot."""
    plugins.load()
    pool = window_pool(head_dim=4)
    shared = buffers()
    shared.share_buffers()
    fill(shared, [1, 2, 3, 4], [5, 6, 7, 8])
    keys, values = pool.get_kv_buffer(0)
    keys.fill_(1.5)
    values.fill_(2.5)
    fill(shared, [1, 2, 3], [5, 6, 7])
    pool.set_swa_loc(shared.out_cache_loc_swa[:4])
    layer = types.SimpleNamespace(layer_id=0)
    nothing = torch.full((4, 1, 4), torch.nan)
    pool.set_kv_buffer(layer, shared.out_cache_loc[:4], nothing, nothing.clone())
    return {
        "untouched": bool((keys[8] == 1.5).all() and (values[8] == 2.5).all()),
        "written": [bool(keys[slot].isnan().all()) for slot in (5, 6, 7)],
    }


def stored_by_type() -> dict[str, Any]:
    """Store to eager locations, which are int32, and to those of a graph, which have their buffer's type."""
    plugins.load()
    from sglang.srt.layers.attention.triton_ops.trtllm_fp8_kv_kernel import fused_fp8_set_kv_buffer

    graph = buffers()
    graph.share_buffers()
    fill(graph, [1, 2, 3, 4], [5, 6, 15, 8])
    keys, values = torch.randn(2, 4, 1, 16)
    layer = types.SimpleNamespace(layer_id=0)

    def stored(locations: torch.Tensor) -> list[torch.Tensor]:
        pool = window_pool(head_dim=16)
        pool.set_swa_loc(locations)
        pool.set_kv_buffer(layer, graph.out_cache_loc, keys, values)
        fused = torch.zeros(2, 16, 1, 16, dtype=torch.float8_e4m3fn)
        fused_fp8_set_kv_buffer(keys, values, *fused, locations, page_size=1)
        return [*pool.get_kv_buffer(0), *fused.float()]

    eager = torch.tensor([5, 6, 15, 8], dtype=torch.int32)
    pairs = list(zip(stored(eager), stored(graph.out_cache_loc_swa), strict=True))
    return {
        "types": [str(eager.dtype), str(graph.out_cache_loc_swa.dtype)],
        "same": [torch.equal(*pair) for pair in pairs],
        "slots": [cache.flatten(1).any(1).nonzero().flatten().tolist() for cache, _ in pairs],
    }


def start() -> str | list[str]:
    plugins.load()
    return breakable_runner_shares(buffers())


def window_pool(head_dim: int) -> Any:
    """A KV pool whose first layer has a window."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=16,
        size_swa=16,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=head_dim,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        enable_kvcache_transpose=False,
        device="cpu",
    )


if __name__ == "__main__":
    named.run(globals())
