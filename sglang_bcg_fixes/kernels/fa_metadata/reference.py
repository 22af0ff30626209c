# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata in plain torch: the other implementations must equal it in every integer."""

from __future__ import annotations

import torch

from sglang_bcg_fixes.kernels.fa_metadata.jobs import DraftExpand, FaMetadata, LocalAttention, VerifyExpand

Tensor = torch.Tensor


def fa_metadata(job: FaMetadata) -> None:
    job.check()
    bs = job.cache_seqlens.shape[0]
    lengths = job.seq_lens[:bs].long() + job.delta
    kept = lengths - lengths % job.page_size if job.drop_last else lengths
    # everything is read before the first write: an output may be an input
    if job.page_table is not None:
        start = torch.zeros_like(kept) if job.row_start is None else job.row_start[:bs].long()
        slots, live = gather(job, bs, start, kept, job.page_table)
        write(job.page_table, slots // job.page_size, live, job.zero_tail)
        if job.swa_page_table is not None:
            write(job.swa_page_table, translate(job.mapping, slots) // job.page_size, live, job.zero_tail)
    if job.swa_out_cache_loc is not None and job.out_cache_loc is not None:
        new = len(job.out_cache_loc)
        job.swa_out_cache_loc[:new] = translate(job.mapping, job.out_cache_loc)
        job.swa_out_cache_loc[new:] = 0
    if job.cu_seqlens_q is not None:
        new_tokens = torch.full_like(lengths, job.q_stride) if job.extend_lens is None else job.extend_lens[:bs].long()
        job.cu_seqlens_q[: bs + 1] = sums(new_tokens)
    if job.cu_seqlens_k is not None:
        job.cu_seqlens_k[: bs + 1] = sums(lengths)
    job.cache_seqlens.copy_(kept)


def draft_expand(job: DraftExpand) -> None:
    job.check()
    bs = job.cache_seqlens.shape[0]
    pages = job.out_cache_loc[: bs * job.steps].view(bs, job.steps)[:, : job.length].long() // job.page_size
    begins = torch.ones_like(pages, dtype=torch.bool)
    if job.page_size > 1:
        begins[:, 1:] = pages[:, 1:] != pages[:, :-1]
    # slots that begin no run are sorted to the end, and are not live
    order = torch.sort((~begins).to(torch.int8), dim=1, stable=True).indices
    table = torch.zeros(bs, job.page_table.shape[1], dtype=torch.long, device=pages.device)
    table[:, : job.length] = pages.gather(1, order)
    live = columns(job.page_table) < begins.sum(1)[:, None]
    write(job.page_table, table, live, job.zero_tail)
    job.cache_seqlens.copy_(job.length + (job.seq_lens[: bs // job.topk] % job.page_size).repeat_interleave(job.topk))
    count_up(job.cu_seqlens_q, bs, 1)
    count_up(job.cu_seqlens_k, bs, job.length)


def verify_expand(job: VerifyExpand) -> None:
    job.check()
    bs = job.cache_seqlens.shape[0]
    requests = bs // job.draft_tokens
    lengths = job.seq_lens[:requests].long()
    token = torch.arange(job.draft_tokens, device=lengths.device)
    # flags of all earlier requests, of the request's earlier draft tokens, and of the tokens before the draft
    request = torch.arange(requests, device=token.device)
    earlier = job.draft_tokens * (job.cu_seqlens[:requests].long() + job.draft_tokens * request)
    first = earlier[:, None] + token * (lengths + job.draft_tokens)[:, None] + lengths[:, None]
    flag = first.flatten()[:, None] + token
    if job.live_rows is not None:
        flag[job.live_rows :] = 0
    sees = job.custom_mask[flag].bool() if bs else torch.zeros_like(flag, dtype=torch.bool)
    order = torch.sort((~sees).to(torch.int8), dim=1, stable=True).indices
    position = lengths[:, None] + token
    within = position < job.req_to_token.shape[1]
    rows = job.req_pool_indices[:requests].long()[:, None]
    slots = torch.where(within, job.req_to_token[rows, position.clamp(max=job.req_to_token.shape[1] - 1)], 0)
    job.page_table[:bs, : job.draft_tokens] = slots.repeat_interleave(job.draft_tokens, dim=0).gather(1, order)
    job.cache_seqlens.copy_(sees.sum(1))
    job.cu_seqlens_k[: bs + 1] = sums(sees.sum(1))
    count_up(job.cu_seqlens_q, bs, 1)


def local_attention(job: LocalAttention) -> None:
    job.check()
    bs = job.seqused.shape[0]
    last = job.seq_lens[:bs].long() - 1
    # rounded towards minus infinity, length 0 has -1 + 1 tokens in the chunk that begins before it
    used = torch.where(last < 0, 0, last % job.chunk + 1)
    start = torch.where(last < 0, 0, last // job.chunk * job.chunk)
    slots, live = gather(job, bs, start, used, job.block_table)
    if job.mapping is not None:
        slots = translate(job.mapping, slots)
    write(job.block_table, slots // job.page_size, live, job.zero_tail)
    job.seqused.copy_(used)
    count_up(job.cu_seqlens_q, bs, 1)


def gather(
    job: FaMetadata | LocalAttention, bs: int, start: Tensor, lengths: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the first slot of each page, 0 in dead columns, and the mask of live columns."""
    first_token, tokens = columns(table) * job.page_size, job.req_to_token.shape[1]
    token = start[:, None] + first_token
    live = (first_token < lengths[:, None]) & (token < tokens)
    slots = job.req_to_token[job.req_pool_indices[:bs].long()[:, None], token.clamp(max=tokens - 1)]
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
