# SPDX-License-Identifier: Apache-2.0
"""One job for each operation: its arguments, and what the contract asks of them.

An implementation trusts a job; its builder checks it once, before the first launch. A check reads shapes, never the
device. Jobs are not frozen, because that costs the host another 1.5 us per step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import torch

Tensor = torch.Tensor

INDEX = (torch.int32, torch.int64)
I32 = (torch.int32,)
I64 = (torch.int64,)
FLAG = (torch.bool, torch.uint8)
LARGEST_PAGE = 1024
MOST_DRAFT_TOKENS = 1024


class Job(Protocol):
    """Any of the four; `operation` names the function of an implementation that takes it."""

    operation: ClassVar[str]

    def check(self) -> None: ...


@dataclasses.dataclass(slots=True)
class FaMetadata:
    """Lengths, their sums and page tables, for every mode."""

    operation: ClassVar[str] = "fa_metadata"

    seq_lens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    cache_seqlens: Tensor
    cu_seqlens_k: Tensor | None
    page_table: Tensor | None
    page_size: int
    _: dataclasses.KW_ONLY
    delta: int = 0
    drop_last: bool = False
    row_start: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    extend_lens: Tensor | None = None
    q_stride: int = 0
    swa_page_table: Tensor | None = None
    mapping: Tensor | None = None
    out_cache_loc: Tensor | None = None
    swa_out_cache_loc: Tensor | None = None
    zero_tail: bool = False

    def check(self) -> None:
        bs = self.cache_seqlens.shape[0]
        check_page_size(self.page_size)
        check_vector("cache_seqlens", self.cache_seqlens, I32, bs)
        check_vector("seq_lens", self.seq_lens, INDEX, bs)
        check_vector("req_pool_indices", self.req_pool_indices, INDEX, bs)
        check_vector("row_start", self.row_start, INDEX, bs)
        check_vector("extend_lens", self.extend_lens, INDEX, bs)
        check_vector("cu_seqlens_k", self.cu_seqlens_k, I32, bs + 1)
        check_vector("cu_seqlens_q", self.cu_seqlens_q, I32, bs + 1)
        check_vector("mapping", self.mapping, I64, 1)
        check_table("req_to_token", self.req_to_token, 0, 0)
        check_table("page_table", self.page_table, bs, 0)
        expect(self.delta >= 0, f"delta is {self.delta}; a length only grows")
        if self.cu_seqlens_q is not None:
            has_one = (self.extend_lens is None) != (self.q_stride == 0)
            expect(has_one, "cu_seqlens_q comes from extend_lens or from q_stride")
        if self.swa_page_table is not None:
            check_table("swa_page_table", self.swa_page_table, bs, 0)
            expect(self.page_table is not None, "swa_page_table is written beside page_table only")
            is_as_wide = self.swa_page_table.shape[1] == table_width(self.page_table)
            expect(is_as_wide, "swa_page_table is as wide as page_table")
        has_locations = self.out_cache_loc is not None
        expect(
            has_locations == (self.swa_out_cache_loc is not None), "out_cache_loc and swa_out_cache_loc come together"
        )
        if self.out_cache_loc is not None:
            check_vector("out_cache_loc", self.out_cache_loc, INDEX, 0)
            check_vector("swa_out_cache_loc", self.swa_out_cache_loc, I64, len(self.out_cache_loc))
        translates = self.swa_page_table is not None or self.swa_out_cache_loc is not None
        expect(translates == (self.mapping is not None), "mapping comes with swa_page_table or swa_out_cache_loc")


@dataclasses.dataclass(slots=True)
class DraftExpand:
    """Lengths and tables of the branches behind the prefix, for draft decode with topk above 1."""

    operation: ClassVar[str] = "draft_expand"

    seq_lens: Tensor
    out_cache_loc: Tensor
    cache_seqlens: Tensor
    page_table: Tensor
    page_size: int
    topk: int
    steps: int
    length: int
    _: dataclasses.KW_ONLY
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    zero_tail: bool = False

    def check(self) -> None:
        bs = self.cache_seqlens.shape[0]
        check_page_size(self.page_size)
        expect(self.topk >= 1 and bs % self.topk == 0, f"{bs} rows are not a multiple of topk {self.topk}")
        expect(1 <= self.length <= self.steps, f"length {self.length} is not in 1 to steps {self.steps}")
        check_vector("seq_lens", self.seq_lens, INDEX, bs // self.topk)
        check_vector("out_cache_loc", self.out_cache_loc, INDEX, bs * self.steps)
        check_vector("cache_seqlens", self.cache_seqlens, I32, bs)
        check_vector("cu_seqlens_q", self.cu_seqlens_q, I32, bs + 1)
        check_vector("cu_seqlens_k", self.cu_seqlens_k, I32, bs + 1)
        check_table("page_table", self.page_table, bs, self.length)


@dataclasses.dataclass(slots=True)
class VerifyExpand:
    """The slots that each draft token sees, for target verify with topk above 1."""

    operation: ClassVar[str] = "verify_expand"

    seq_lens: Tensor
    cu_seqlens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    custom_mask: Tensor
    cache_seqlens: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor
    draft_tokens: int
    _: dataclasses.KW_ONLY
    live_rows: int | None = None
    cu_seqlens_q: Tensor | None = None

    def check(self) -> None:
        bs = self.cache_seqlens.shape[0]
        fits = 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS
        expect(fits, f"draft_tokens {self.draft_tokens} is not in 1 to {MOST_DRAFT_TOKENS}")
        expect(bs % self.draft_tokens == 0, f"{bs} rows are not a multiple of draft_tokens {self.draft_tokens}")
        expect(self.live_rows is None or self.live_rows >= 0, f"live_rows is {self.live_rows}")
        requests = bs // self.draft_tokens
        check_vector("seq_lens", self.seq_lens, INDEX, requests)
        check_vector("cu_seqlens", self.cu_seqlens, I32, requests + 1)
        check_vector("req_pool_indices", self.req_pool_indices, INDEX, requests)
        check_vector("custom_mask", self.custom_mask, FLAG, 0)
        check_vector("cache_seqlens", self.cache_seqlens, I32, bs)
        check_vector("cu_seqlens_k", self.cu_seqlens_k, I32, bs + 1)
        check_vector("cu_seqlens_q", self.cu_seqlens_q, I32, bs + 1)
        check_table("req_to_token", self.req_to_token, 0, 1)
        check_table("page_table", self.page_table, bs, self.draft_tokens)


@dataclasses.dataclass(slots=True)
class LocalAttention:
    """The chunk that each request's one query is in."""

    operation: ClassVar[str] = "local_attention"

    seq_lens: Tensor
    req_pool_indices: Tensor
    req_to_token: Tensor
    seqused: Tensor
    block_table: Tensor
    chunk: int
    page_size: int
    _: dataclasses.KW_ONLY
    cu_seqlens_q: Tensor | None = None
    mapping: Tensor | None = None
    zero_tail: bool = False

    def check(self) -> None:
        bs = self.seqused.shape[0]
        check_page_size(self.page_size)
        expect(
            self.chunk >= self.page_size and self.chunk % self.page_size == 0,
            f"chunk {self.chunk} is not a multiple of page_size {self.page_size}",
        )
        check_vector("seq_lens", self.seq_lens, INDEX, bs)
        check_vector("req_pool_indices", self.req_pool_indices, INDEX, bs)
        check_vector("seqused", self.seqused, I32, bs)
        check_vector("cu_seqlens_q", self.cu_seqlens_q, I32, bs + 1)
        check_vector("mapping", self.mapping, I64, 1)
        check_table("req_to_token", self.req_to_token, 0, 1)
        check_table("block_table", self.block_table, bs, self.chunk // self.page_size)


def check_page_size(page_size: int) -> None:
    is_power = 1 <= page_size <= LARGEST_PAGE and page_size & (page_size - 1) == 0
    expect(is_power, f"page_size {page_size} is not a power of two from 1 to {LARGEST_PAGE}")


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
