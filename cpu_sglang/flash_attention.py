# SPDX-License-Identifier: Apache-2.0
"""The two FlashAttention functions that SGLang's FlashAttentionBackend calls, in plain torch.

As on a GPU, a sequence without keys gets zeros, and rows behind the last sequence keep what memory holds: NaN here, or
what `out` had.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from . import graphs

BACKEND = "sglang.srt.layers.attention.flashattention_backend"
REGISTRY = "sglang.srt.layers.attention.attention_registry"


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend q (rows, heads, size) to k, v (keys, kv heads, size); output, log-sum-exp (heads, rows)."""
    rows, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    k = k.repeat_interleave(heads // kv_heads, dim=1).float()
    v = v.repeat_interleave(heads // kv_heads, dim=1).float()
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # the last query aligns with the last key
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    visible = distance <= 0 if causal else torch.ones(rows, keys, dtype=torch.bool)
    left, right = window
    if left is not None and left >= 0:
        visible = visible & (distance >= -left)
    if right is not None and right >= 0:
        visible = visible & (distance <= right)
    scores = scores.masked_fill(~visible, float("-inf"))
    with_sinks = scores
    if sinks is not None:
        with_sinks = torch.cat([scores, sinks.float()[:, None, None].expand(heads, rows, 1)], dim=-1)
    log_sum = torch.logsumexp(with_sinks, dim=-1)
    weights = torch.exp(scores - log_sum[..., None]).nan_to_num(0.0)
    return torch.einsum("hmn,nhd->mhd", weights, v), log_sum


def _output_of(q: Tensor, size: int, out: Tensor | None) -> Tensor:
    """The rows to write into: those of `out`, or uninitialised memory."""
    if out is not None:
        return out.view(q.shape[0], q.shape[1], size)
    return q.new_full((q.shape[0], q.shape[1], size), float("nan"))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *_: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **__: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend for sequences packed one after the other in q, and likewise in k and v."""
    scale = softmax_scale or 1 / math.sqrt(q.shape[-1])
    output = _output_of(q, v.shape[-1], out)
    log_sum = torch.zeros(q.shape[1], q.shape[0])
    query_ends, key_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(len(query_ends) - 1):
        queries = slice(query_ends[sequence], query_ends[sequence + 1])
        keys = slice(key_ends[sequence], key_ends[sequence + 1])
        if keys.start == keys.stop:
            output[queries] = 0
        elif queries.start < queries.stop:
            attended = _attend(q[queries], k[keys], v[keys], scale, causal, window_size, softcap, sinks)
            output[queries], log_sum[:, queries] = attended[0].to(output.dtype), attended[1]
    return (output, log_sum) if return_softmax_lse else output


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *_: Any,
    page_table: Tensor,
    cache_seqlens: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **__: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to a paged cache. With `qv` (absorbed MLA) the values are keys too: scores = q.k + qv.v."""
    shape = q.shape
    if q.ndim == 4:
        sequences, rows = q.shape[:2]
        cu_seqlens_q = torch.arange(0, sequences * rows + 1, rows)
        q = q.flatten(0, 1)
        qv = None if qv is None else qv.flatten(0, 1)
    key_size = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    scale = softmax_scale or 1 / math.sqrt(key_size)
    page_size = k_cache.shape[1]
    output = _output_of(q, v_cache.shape[-1], out)
    log_sum = torch.zeros(q.shape[1], q.shape[0])
    assert cu_seqlens_q is not None, "SGLang hands it where the queries are not one row for each sequence"
    query_ends = cu_seqlens_q.tolist()
    for sequence, length in enumerate(cache_seqlens.tolist()[: len(query_ends) - 1]):
        queries = slice(query_ends[sequence], query_ends[sequence + 1])
        if queries.start == queries.stop or length == 0:
            output[queries] = 0
            continue
        pages = page_table[sequence, : -(-length // page_size)].long()
        query = q[queries]
        key, value = k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length]
        if qv is not None:
            query = torch.cat([query, qv[queries]], dim=-1)
            key = torch.cat([key, value.expand(-1, key.shape[1], -1)], dim=-1)
        attended = _attend(query, key, value, scale, causal, window_size, softcap, sinks)
        output[queries], log_sum[:, queries] = attended[0].to(output.dtype), attended[1]
    output = output.view(*shape[:-1], -1)
    return (output, log_sum) if return_softmax_lse else output


def install() -> None:
    """Call once sglang is importable: `attention_backend="fa3"` then runs as on a Hopper GPU."""
    kernels = [graphs.opaque(kernel) for kernel in (flash_attn_varlen_func, flash_attn_with_kvcache)]
    for name in (BACKEND, REGISTRY):
        module = importlib.import_module(name)
        for replacement in (*kernels, get_device_capability):
            if hasattr(module, replacement.__name__):
                setattr(module, replacement.__name__, replacement)


def get_device_capability(device_id: int = 0) -> tuple[int, int]:
    return (9, 0)
