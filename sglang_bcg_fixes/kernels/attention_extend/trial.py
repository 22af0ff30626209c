# SPDX-License-Identifier: Apache-2.0
"""The installed FlashAttention, tried once a server: captured with its padding as a request, it has the bits of eager.

What it does with rows that have no keys, and how it splits keys, stands in a binary that no probe can read.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sglang_bcg_fixes.kernels.attention_extend import splits
from sglang_bcg_fixes.kernels.attention_extend.fa3 import Tables, multiprocessors
from sglang_bcg_fixes.kernels.fa_metadata.declaration import MODULE

Tensor = torch.Tensor
Requests = tuple[tuple[int, int], ...]

# new tokens and keys: alone, behind a prefix, several, one that has no padding, and those whose keys are split
TRIED: tuple[Requests, ...] = (
    ((5, 5),),
    ((29, 300),),
    ((3, 3), (1, 300), (7, 20)),
    ((32, 32),),
    # of large pages FlashAttention reads in another way where a launch has many rows
    ((100, 300),),
    # few for each request, many for the graph
    ((20, 40), (20, 300), (20, 20)),
    *(((29, keys),) for keys in (1000, 2000, 3000, 6000)),
)
BUCKETS = (8, 32, 64, 128)
SEED = 0
# with torch 2.13 the end of a graph frees cuBLAS's workspaces of its stream, also for other graphs
KEPT: list[torch.cuda.CUDAGraph] = []


class Layer:
    """One kind of attention layer with random queries and keys."""

    def __init__(
        self, heads: splits.Heads, keys: int, page_size: int, device: torch.device, dtype: Any, sinks: bool
    ) -> None:
        self.heads, self.page_size, self.device = heads, page_size, device
        self.random = torch.Generator(device).manual_seed(SEED)
        self.dtype = dtype
        pages = -(-keys // page_size) + 1
        self.key_cache, self.value_cache = (
            self.normal(pages, page_size, heads.keys, heads.size) for _ in ("keys", "values")
        )
        self.sinks = {"sinks": self.normal(heads.queries)} if sinks else {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device, dtype=self.dtype)

    def attend(self, queries: Tensor, metadata: Any, rows: int, bound: int) -> Tensor:
        """Call FlashAttention as SGLang's backend does."""
        window = self.heads.window
        found: Tensor = vars(importlib.import_module(MODULE))["flash_attn_with_kvcache"](
            q=queries,
            k_cache=self.key_cache,
            v_cache=self.value_cache,
            page_table=metadata.page_table,
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=rows,
            softmax_scale=self.heads.size**-0.5,
            causal=True,
            window_size=(window, 0 if window >= 0 else -1),
            num_splits=bound,
            **self.sinks,
        )
        return found


def metadata_of(requests: Requests, page_size: int, pages: int, device: torch.device, generator: Any) -> Any:
    """Metadata as SGLang prepares it: a table as wide as the longest request, of random pages."""

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    width = -(-max(keys for _, keys in requests) // page_size)
    table = torch.randint(0, pages, (len(requests), width), generator=generator, device=device, dtype=torch.int32)
    new = [rows for rows, _ in requests]
    return types.SimpleNamespace(
        cache_seqlens_int32=integers([keys for _, keys in requests]),
        cu_seqlens_q=integers([sum(new[:number]) for number in range(len(new) + 1)]),
        page_table=table,
        swa_page_table=None,
        swa_out_cache_loc=None,
    )


def captured(call: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return what a graph of the call leaves in memory that held no number; what the call returns where no GPU is."""
    if device.type != "cuda":
        return call()
    # what is only done once must not be captured
    call()
    graph, pool = torch.cuda.CUDAGraph(), KEPT[0].pool() if KEPT else None
    KEPT.append(graph)
    with torch.cuda.graph(graph, pool=pool):
        found = call()
    found.fill_(float("nan"))
    graph.replay()
    return found.clone()


def difference(layer: Layer, tables: Any, requests: Requests, rows: int, bound: int, eager_bound: int) -> str | None:
    """Say how the captured call differs from the eager one, or None."""
    metadata = metadata_of(requests, layer.page_size, len(layer.key_cache), layer.device, layer.random)
    new = sum(rows for rows, _ in requests)
    queries = layer.normal(rows, layer.heads.queries, layer.heads.size)
    eager = layer.attend(queries[:new], metadata, max(rows for rows, _ in requests), eager_bound)
    tables.fill(metadata, rows)
    inside = captured(lambda: layer.attend(queries, tables.metadata, rows, bound), layer.device)
    if not torch.equal(inside[:new], eager):
        worst = float((inside[:new] - eager).abs().max())
        return f"other values for {described(requests)} in a graph of {rows} rows, by up to {worst:.3g}"
    # what is not a number counts, too
    if bool(inside[new:].any()):
        return f"rows of padding that are no zeros behind {described(requests)} in a graph of {rows} rows"
    return None


def described(requests: Requests) -> str:
    return " + ".join(f"{new} tokens behind {keys - new}" for new, keys in requests)


def cases(
    heads: splits.Heads, page_size: int, table_keys: int, multiprocessors: int, eager_bound: int
) -> Iterator[tuple[Requests, int, int]]:
    """Requests, rows and bounds whose keys are split alike by what `splits` knows."""
    for requests in TRIED:
        new = sum(rows for rows, _ in requests)
        rows = next(bucket for bucket in BUCKETS if bucket >= new)
        longest = max(keys for _, keys in requests)
        eager = (max(rows for rows, _ in requests), -(-longest // page_size) * page_size)
        if eager[1] > table_keys:
            continue
        for bound in (1, 0):
            if splits.agree(heads, requests, eager, (rows, table_keys), bound, multiprocessors, eager_bound):
                yield requests, rows, bound


def first_difference(
    kinds: Mapping[splits.Heads, bool], backend: Any, pages: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Try every kind of layer of a server, which has sinks or has none; say what is not as expected, or None."""
    page_size, bound_of_eager, parts = backend.page_size, backend.num_splits, multiprocessors(device)
    longest = max(keys for requests in TRIED for _, keys in requests)
    tables = None
    for heads, has_sinks in kinds.items():
        layer = Layer(heads, longest, page_size, device, dtype, has_sinks)
        if tables is None:
            tables = Tables(metadata_of(TRIED[0], page_size, 1, device, layer.random), pages, max(BUCKETS), device)
        for requests, rows, bound in cases(heads, page_size, pages * page_size, parts, bound_of_eager):
            found = difference(layer, tables, requests, rows, bound, bound_of_eager)
            if found:
                return f"FlashAttention has {found}"
    return None
