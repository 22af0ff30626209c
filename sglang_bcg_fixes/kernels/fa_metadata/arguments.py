"""What the contract asks of arguments. A form trusts them; who builds them asks once, before the first launch."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

INDEX = (torch.int32, torch.int64)
I32 = (torch.int32,)
I64 = (torch.int64,)
FLAG = (torch.bool, torch.uint8)
LARGEST_PAGE = 1024
MOST_DRAFT_TOKENS = 1024


def check_fa_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    page_table: Tensor | None,
    page_size: int,
    *,
    delta: int = 0,
    drop_last: bool = False,
    row_start: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    extend_lens: Tensor | None = None,
    q_stride: int = 0,
    swa_page_table: Tensor | None = None,
    mapping: Tensor | None = None,
    out_cache_loc: Tensor | None = None,
    swa_out_cache_loc: Tensor | None = None,
    zero_tail: bool = False,
) -> None:
    bs = cache_seqlens.shape[0]
    check_page_size(page_size)
    check_vector("cache_seqlens", cache_seqlens, I32, bs)
    check_vector("seq_lens", seq_lens, INDEX, bs)
    check_vector("req_pool_indices", req_pool_indices, INDEX, bs)
    check_vector("row_start", row_start, INDEX, bs)
    check_vector("extend_lens", extend_lens, INDEX, bs)
    check_vector("cu_seqlens_k", cu_seqlens_k, I32, bs + 1)
    check_vector("cu_seqlens_q", cu_seqlens_q, I32, bs + 1)
    check_vector("mapping", mapping, I64, 1)
    check_table("req_to_token", req_to_token, 0, 0)
    check_table("page_table", page_table, bs, 0)
    expect(delta >= 0, f"delta is {delta}; a length only grows")
    if cu_seqlens_q is not None:
        expect((extend_lens is None) != (q_stride == 0), "cu_seqlens_q comes from extend_lens or from q_stride")
    if swa_page_table is not None:
        check_table("swa_page_table", swa_page_table, bs, 0)
        expect(page_table is not None, "swa_page_table is written beside page_table only")
        expect(swa_page_table.shape[1] == table_width(page_table), "swa_page_table is as wide as page_table")
    expect((out_cache_loc is None) == (swa_out_cache_loc is None), "out_cache_loc and swa_out_cache_loc come together")
    if out_cache_loc is not None:
        check_vector("out_cache_loc", out_cache_loc, INDEX, 0)
        check_vector("swa_out_cache_loc", swa_out_cache_loc, I64, len(out_cache_loc))
    translates = swa_page_table is not None or swa_out_cache_loc is not None
    expect(translates == (mapping is not None), "mapping comes with swa_page_table or swa_out_cache_loc")


def check_draft_expand(
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    page_size: int,
    topk: int,
    steps: int,
    length: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    zero_tail: bool = False,
) -> None:
    bs = cache_seqlens.shape[0]
    check_page_size(page_size)
    expect(topk >= 1 and bs % topk == 0, f"{bs} rows are no multiple of topk {topk}")
    expect(1 <= length <= steps, f"length {length} is not in 1 to steps {steps}")
    check_vector("seq_lens", seq_lens, INDEX, bs // topk)
    check_vector("out_cache_loc", out_cache_loc, INDEX, bs * steps)
    check_vector("cache_seqlens", cache_seqlens, I32, bs)
    check_vector("cu_seqlens_q", cu_seqlens_q, I32, bs + 1)
    check_vector("cu_seqlens_k", cu_seqlens_k, I32, bs + 1)
    check_table("page_table", page_table, bs, length)


def check_verify_expand(
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    custom_mask: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    page_table: Tensor,
    draft_tokens: int,
    *,
    live_rows: int | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    bs = cache_seqlens.shape[0]
    expect(1 <= draft_tokens <= MOST_DRAFT_TOKENS, f"draft_tokens {draft_tokens} is not in 1 to {MOST_DRAFT_TOKENS}")
    expect(bs % draft_tokens == 0, f"{bs} rows are no multiple of draft_tokens {draft_tokens}")
    expect(live_rows is None or live_rows >= 0, f"live_rows is {live_rows}")
    requests = bs // draft_tokens
    check_vector("seq_lens", seq_lens, INDEX, requests)
    check_vector("cu_seqlens", cu_seqlens, I32, requests + 1)
    check_vector("req_pool_indices", req_pool_indices, INDEX, requests)
    check_vector("custom_mask", custom_mask, FLAG, 0)
    check_vector("cache_seqlens", cache_seqlens, I32, bs)
    check_vector("cu_seqlens_k", cu_seqlens_k, I32, bs + 1)
    check_vector("cu_seqlens_q", cu_seqlens_q, I32, bs + 1)
    check_table("req_to_token", req_to_token, 0, 1)
    check_table("page_table", page_table, bs, draft_tokens)


def check_local_attention(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seqused: Tensor,
    block_table: Tensor,
    chunk: int,
    page_size: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    mapping: Tensor | None = None,
    zero_tail: bool = False,
) -> None:
    bs = seqused.shape[0]
    check_page_size(page_size)
    expect(chunk >= page_size and chunk % page_size == 0, f"chunk {chunk} is no multiple of page_size {page_size}")
    check_vector("seq_lens", seq_lens, INDEX, bs)
    check_vector("req_pool_indices", req_pool_indices, INDEX, bs)
    check_vector("seqused", seqused, I32, bs)
    check_vector("cu_seqlens_q", cu_seqlens_q, I32, bs + 1)
    check_vector("mapping", mapping, I64, 1)
    check_table("req_to_token", req_to_token, 0, 1)
    check_table("block_table", block_table, bs, chunk // page_size)


def check_page_size(page_size: int) -> None:
    is_power = 1 <= page_size <= LARGEST_PAGE and page_size & (page_size - 1) == 0
    expect(is_power, f"page_size {page_size} is no power of two from 1 to {LARGEST_PAGE}")


def check_vector(name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], least: int) -> None:
    if tensor is None:
        return
    expect(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
    expect(tensor.ndim == 1 and len(tensor) >= least, f"{name} is {list(tensor.shape)}, not [{least}] or longer")
    expect(tensor.stride(0) == 1 or len(tensor) < 2, f"{name} has stride {tensor.stride(0)}, not 1")


def check_table(name: str, tensor: Tensor | None, rows: int, width: int) -> None:
    if tensor is None:
        return
    expect(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not torch.int32")
    fits = tensor.ndim == 2 and tensor.shape[0] >= rows and tensor.shape[1] >= width
    expect(fits, f"{name} is {list(tensor.shape)}, not [{rows}, {width}] or larger")
    expect(tensor.stride(1) == 1 or tensor.shape[1] < 2, f"the rows of {name} have stride {tensor.stride(1)}, not 1")


def table_width(table: Any) -> int:
    return int(table.shape[1])


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"fa_metadata: {message}")
