"""FlashAttention's metadata in plain torch: what the other forms have to equal in every integer."""

from __future__ import annotations

import torch

from sglang_bcg_fixes.kernels.fa_metadata import arguments

Tensor = torch.Tensor


def fa_metadata(
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
    arguments.check_fa_metadata(**locals())
    bs = cache_seqlens.shape[0]
    lengths = seq_lens[:bs].long() + delta
    kept = lengths - lengths % page_size if drop_last else lengths
    # everything is read before the first write: an output may be an input
    if page_table is not None:
        start = torch.zeros_like(kept) if row_start is None else row_start[:bs].long()
        slots, live = gather(req_to_token, req_pool_indices[:bs], start, kept, page_table.shape[1], page_size)
        write(page_table, slots // page_size, live, zero_tail)
        if swa_page_table is not None:
            write(swa_page_table, translate(mapping, slots) // page_size, live, zero_tail)
    if swa_out_cache_loc is not None and out_cache_loc is not None:
        new = len(out_cache_loc)
        swa_out_cache_loc[:new] = translate(mapping, out_cache_loc)
        swa_out_cache_loc[new:] = 0
    if cu_seqlens_q is not None:
        new_tokens = torch.full_like(lengths, q_stride) if extend_lens is None else extend_lens[:bs].long()
        cu_seqlens_q[: bs + 1] = sums(new_tokens)
    if cu_seqlens_k is not None:
        cu_seqlens_k[: bs + 1] = sums(lengths)
    cache_seqlens.copy_(kept)


def draft_expand(
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
    arguments.check_draft_expand(**locals())
    bs = cache_seqlens.shape[0]
    pages = out_cache_loc[: bs * steps].view(bs, steps)[:, :length].long() // page_size
    begins = torch.ones_like(pages, dtype=torch.bool)
    if page_size > 1:
        begins[:, 1:] = pages[:, 1:] != pages[:, :-1]
    # what begins no run is sorted behind the rest, and is not live
    order = torch.sort((~begins).to(torch.int8), dim=1, stable=True).indices
    table = torch.zeros(bs, page_table.shape[1], dtype=torch.long, device=pages.device)
    table[:, :length] = pages.gather(1, order)
    live = columns(page_table) < begins.sum(1)[:, None]
    write(page_table, table, live, zero_tail)
    cache_seqlens.copy_(length + (seq_lens[: bs // topk] % page_size).repeat_interleave(topk))
    count_up(cu_seqlens_q, bs, 1)
    count_up(cu_seqlens_k, bs, length)


def verify_expand(
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
    arguments.check_verify_expand(**locals())
    bs = cache_seqlens.shape[0]
    requests = bs // draft_tokens
    lengths = seq_lens[:requests].long()
    token = torch.arange(draft_tokens, device=lengths.device)
    # flags of all earlier requests, of the request's earlier draft tokens, and of the tokens before the draft
    earlier = draft_tokens * (cu_seqlens[:requests].long() + draft_tokens * torch.arange(requests, device=token.device))
    first = earlier[:, None] + token * (lengths + draft_tokens)[:, None] + lengths[:, None]
    flag = first.flatten()[:, None] + token
    if live_rows is not None:
        flag[live_rows:] = 0
    sees = custom_mask[flag].bool() if bs else torch.zeros_like(flag, dtype=torch.bool)
    order = torch.sort((~sees).to(torch.int8), dim=1, stable=True).indices
    position = lengths[:, None] + token
    within = position < req_to_token.shape[1]
    rows = req_pool_indices[:requests].long()[:, None]
    slots = torch.where(within, req_to_token[rows, position.clamp(max=req_to_token.shape[1] - 1)], 0)
    page_table[:bs, :draft_tokens] = slots.repeat_interleave(draft_tokens, dim=0).gather(1, order)
    cache_seqlens.copy_(sees.sum(1))
    cu_seqlens_k[: bs + 1] = sums(sees.sum(1))
    count_up(cu_seqlens_q, bs, 1)


def local_attention(
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
    arguments.check_local_attention(**locals())
    bs = seqused.shape[0]
    last = seq_lens[:bs].long() - 1
    # rounded towards minus infinity, length 0 has -1 + 1 tokens in the chunk that begins before it
    used = torch.where(last < 0, 0, last % chunk + 1)
    start = torch.where(last < 0, 0, last // chunk * chunk)
    slots, live = gather(req_to_token, req_pool_indices[:bs], start, used, block_table.shape[1], page_size)
    if mapping is not None:
        slots = translate(mapping, slots)
    write(block_table, slots // page_size, live, zero_tail)
    seqused.copy_(used)
    count_up(cu_seqlens_q, bs, 1)


def gather(
    req_to_token: Tensor, indices: Tensor, start: Tensor, lengths: Tensor, width: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """The slot that each page begins with, and which columns are live; the others hold 0."""
    column = torch.arange(width, device=lengths.device)
    token = start[:, None] + column * page_size
    live = (column * page_size < lengths[:, None]) & (token < req_to_token.shape[1])
    slots = req_to_token[indices.long()[:, None], token.clamp(max=req_to_token.shape[1] - 1)]
    return torch.where(live, slots, 0), live


def write(table: Tensor, values: Tensor, live: Tensor, zero_tail: bool) -> None:
    behind = torch.zeros_like(table[: len(live)]) if zero_tail else table[: len(live)]
    table[: len(live)] = torch.where(live, values.to(table.dtype), behind)


def translate(mapping: Tensor | None, slots: Tensor) -> Tensor:
    assert mapping is not None
    return torch.where(slots < 0, -1, mapping[slots.long().clamp(min=0)])


def columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)


def sums(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))


def count_up(out: Tensor | None, rows: int, by: int) -> None:
    if out is not None:
        out[: rows + 1] = by * torch.arange(rows + 1, device=out.device)
