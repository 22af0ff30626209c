# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata in one Triton launch each; see the package for the contract.

fa_metadata's grid is one program for lengths and sums, `share` programs for each row of the tables, and one for every
block of swa_out_cache_loc. The programs of a row stride over its live blocks, so a wide table with short rows costs no
more than a narrow one. Nothing that changes from step to step is specialised on: a server must never stop to compile.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.fa_metadata.jobs import DraftExpand, FaMetadata, LocalAttention, VerifyExpand
from sglang_bcg_fixes.kernels.triton_launch import launched

Tensor = torch.Tensor

WARPS = 4
# columns per block: adjacent slots are read 16 bytes at a time, those of larger pages one by one
COLUMNS_OF_SLOTS = 2048
COLUMNS_OF_PAGES = 1024
# enough programs to fill every multiprocessor
PROGRAMS_OF_A_MULTIPROCESSOR = 4
LENGTHS = 1024
LOCATIONS = 512
# flags of draft tokens per block; above the second number, another launch sums the counts
FLAGS = 2048
FLAGS_OF_ONE_PROGRAM = 8 * FLAGS
# elements in 16 bytes, the widest access; row strides are constant for a server
WIDEST = 4


@triton.jit
def write_pages(
    table,
    swa_table,
    slots,
    mapping,
    first_block,
    block_step,
    live,
    width,
    SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
):
    """Write blocks of one row; full ones without a mask, which would prevent wide accesses.

    Either table may be None, and both have the same columns.
    """
    end = width if ZERO_TAIL else live
    for block in range(first_block, tl.cdiv(end, COLUMNS), block_step):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        if (block + 1) * COLUMNS <= live:
            slot = tl.load(slots + (column << SHIFT))
            if table is not None:
                tl.store(table + column, slot >> SHIFT)
            if swa_table is not None:
                swa_slot = tl.load(mapping + slot, mask=slot >= 0, other=-1)
                tl.store(swa_table + column, (swa_slot >> SHIFT).to(tl.int32))
        else:
            is_live = column < live
            slot = tl.load(slots + (column << SHIFT), mask=is_live, other=0)
            if table is not None:
                tl.store(table + column, tl.where(is_live, slot >> SHIFT, 0), mask=column < end)
            if swa_table is not None:
                swa_slot = tl.load(mapping + slot, mask=is_live & (slot >= 0), other=-1)
                swa_page = tl.where(is_live, (swa_slot >> SHIFT).to(tl.int32), 0)
                tl.store(swa_table + column, swa_page, mask=column < end)


@triton.jit
def live_pages(kept, start, tokens, width, SHIFT: tl.constexpr):
    """Count the pages to write: those of the row that fit the table and begin within the pool's row."""
    PAGE: tl.constexpr = 1 << SHIFT
    live = (kept + (PAGE - 1)) >> SHIFT
    within = (tl.maximum(tokens - start, 0) + (PAGE - 1)) >> SHIFT
    return tl.minimum(tl.minimum(live, within), width)


@triton.jit
def write_lengths(
    seq_lens,
    cache_seqlens,
    cu_seqlens_k,
    cu_seqlens_q,
    extend_lens,
    bs,
    delta,
    q_stride,
    SHIFT: tl.constexpr,
    DROP_LAST: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    if cu_seqlens_k is not None:
        tl.store(cu_seqlens_k, 0)
    if cu_seqlens_q is not None:
        tl.store(cu_seqlens_q, 0)
    sum_k = tl.full((), 0, tl.int32)
    sum_q = tl.full((), 0, tl.int32)
    for first in range(0, bs, LENGTHS):
        row = first + tl.arange(0, LENGTHS)
        is_row = row < bs
        length = tl.load(seq_lens + row, mask=is_row, other=0).to(tl.int32) + tl.where(is_row, delta, 0)
        kept = length
        if DROP_LAST:
            kept = (length >> SHIFT) << SHIFT
        tl.store(cache_seqlens + row, kept, mask=is_row)
        if cu_seqlens_k is not None:
            tl.store(cu_seqlens_k + 1 + row, sum_k + tl.cumsum(length, 0), mask=is_row)
            sum_k += tl.sum(length, 0)
        if cu_seqlens_q is not None:
            if extend_lens is not None:
                new = tl.load(extend_lens + row, mask=is_row, other=0).to(tl.int32)
                tl.store(cu_seqlens_q + 1 + row, sum_q + tl.cumsum(new, 0), mask=is_row)
                sum_q += tl.sum(new, 0)
            else:
                tl.store(cu_seqlens_q + 1 + row, (row + 1) * q_stride, mask=is_row)


@launched(tables=3, numbers=9, warps=WARPS)
def fa_metadata_kernel(
    req_to_token,
    page_table,
    swa_page_table,
    seq_lens,
    req_pool_indices,
    cache_seqlens,
    cu_seqlens_k,
    row_start,
    cu_seqlens_q,
    extend_lens,
    mapping,
    out_cache_loc,
    swa_out_cache_loc,
    req_stride,
    table_stride,
    swa_stride,
    bs,
    tokens,
    width,
    delta,
    q_stride,
    share,
    first_program,
    new,
    room,
    SHIFT: tl.constexpr,
    DROP_LAST: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
    LOCATIONS: tl.constexpr,
    WIDE_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    WIDE_SWA: tl.constexpr,
):
    program = tl.program_id(0) + first_program
    if program == 0:
        write_lengths(
            seq_lens,
            cache_seqlens,
            cu_seqlens_k,
            cu_seqlens_q,
            extend_lens,
            bs,
            delta,
            q_stride,
            SHIFT,
            DROP_LAST,
            LENGTHS,
        )
        return
    program -= 1
    if page_table is not None:
        if program < bs * share:
            row = program // share
            length = tl.load(seq_lens + row).to(tl.int32) + delta
            request = tl.load(req_pool_indices + row).to(tl.int64)
            kept = length
            if DROP_LAST:
                kept = (length >> SHIFT) << SHIFT
            start = 0
            if row_start is not None:
                start = tl.load(row_start + row).to(tl.int32)
            swa_row = None
            if swa_page_table is not None:
                swa_row = swa_page_table + tl.multiple_of(row.to(tl.int64) * swa_stride, WIDE_SWA)
            write_pages(
                page_table + tl.multiple_of(row.to(tl.int64) * table_stride, WIDE_OUT),
                swa_row,
                req_to_token + tl.multiple_of(request * req_stride, WIDE_IN) + start,
                mapping,
                program % share,
                share,
                live_pages(kept, start, tokens, width, SHIFT),
                width,
                SHIFT,
                COLUMNS,
                ZERO_TAIL,
            )
            return
        program -= bs * share
    if swa_out_cache_loc is not None:
        place = program * LOCATIONS + tl.arange(0, LOCATIONS)
        slot = tl.load(out_cache_loc + place, mask=place < new, other=0)
        swa_slot = tl.load(mapping + slot, mask=(place < new) & (slot >= 0), other=-1)
        tl.store(swa_out_cache_loc + place, tl.where(place < new, swa_slot, 0), mask=place < room)


def fa_metadata(job: FaMetadata) -> None:
    bs = job.cache_seqlens.shape[0]
    columns = columns_at_a_time(job.page_size)
    req_stride, tokens = job.req_to_token.stride(0), job.req_to_token.shape[1]
    width = share = table_stride = swa_stride = new = room = 0
    if job.page_table is not None:
        width, table_stride = job.page_table.shape[1], job.page_table.stride(0)
        share = programs_of_a_row(bs, width, columns, multiprocessors(job.seq_lens.device.index))
        if job.swa_page_table is not None:
            swa_stride = job.swa_page_table.stride(0)
    if job.swa_out_cache_loc is not None and job.out_cache_loc is not None:
        new, room = job.out_cache_loc.shape[0], job.swa_out_cache_loc.shape[0]
    others = bs * share + -(-room // LOCATIONS)
    launches = [(0, 1 + others)]
    if others and (job.delta or job.drop_last) and job.seq_lens.data_ptr() == job.cache_seqlens.data_ptr():
        # otherwise rows would read lengths that the first program overwrites
        launches = [(1, others), (0, 1)]
    tensors = (
        job.req_to_token,
        job.page_table,
        job.swa_page_table,
        job.seq_lens,
        job.req_pool_indices,
        job.cache_seqlens,
        job.cu_seqlens_k,
        job.row_start,
        job.cu_seqlens_q,
        job.extend_lens,
        job.mapping,
        job.out_cache_loc,
        job.swa_out_cache_loc,
    )
    strides = (req_stride, table_stride, swa_stride)
    constants = (
        job.page_size.bit_length() - 1,
        job.drop_last,
        job.zero_tail,
        columns,
        LENGTHS,
        LOCATIONS,
        math.gcd(WIDEST, req_stride),
        math.gcd(WIDEST, table_stride),
        math.gcd(WIDEST, swa_stride),
    )
    for first_program, programs in launches:
        numbers = (bs, tokens, width, job.delta, job.q_stride, share, first_program, new, room)
        fa_metadata_kernel(programs, tensors, strides, numbers, constants)


@launched(tables=0, numbers=5, warps=WARPS)
def draft_expand_kernel(
    seq_lens,
    out_cache_loc,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k,
    table_stride,
    rows,
    width,
    length,
    topk,
    steps,
    SHIFT: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # the sums have one element more than there are rows
    if cu_seqlens_q is not None:
        tl.store(cu_seqlens_q + row, row, mask=row <= rows)
    if cu_seqlens_k is not None:
        tl.store(cu_seqlens_k + row, row * length, mask=row <= rows)
    is_row = row < rows
    before = tl.load(seq_lens + row // topk, mask=is_row, other=0).to(tl.int32)
    tl.store(cache_seqlens + row, length + before - ((before >> SHIFT) << SHIFT), mask=is_row)

    step = tl.arange(0, STEPS)[None, :]
    is_step = is_row[:, None] & (step < length)
    place = out_cache_loc + row.to(tl.int64)[:, None] * steps + step
    page = (tl.load(place, mask=is_step, other=0) >> SHIFT).to(tl.int32)
    earlier = (tl.load(place - 1, mask=is_step & (step > 0), other=0) >> SHIFT).to(tl.int32)
    # with page size 1 every slot is listed: padded rows repeat the same one
    begins = is_step & ((step == 0) | (page != earlier) | (SHIFT == 0))
    column = tl.cumsum(begins.to(tl.int32), 1) - 1
    line = page_table + row.to(tl.int64)[:, None] * table_stride
    tl.store(line + column, page, mask=begins)
    if ZERO_TAIL:
        used = tl.sum(begins.to(tl.int32), 1)[:, None]
        for first in range(0, width, STEPS):
            behind = first + step
            tl.store(line + behind, 0, mask=is_row[:, None] & (behind >= used) & (behind < width))


def draft_expand(job: DraftExpand) -> None:
    rows, tile = job.cache_seqlens.shape[0], power_of_two(job.steps)
    at_a_time = max(1, FLAGS // tile)
    draft_expand_kernel(
        rows // at_a_time + 1,
        (job.seq_lens, job.out_cache_loc, job.cache_seqlens, job.page_table, job.cu_seqlens_q, job.cu_seqlens_k),
        (job.page_table.stride(0),),
        (rows, job.page_table.shape[1], job.length, job.topk, job.steps),
        (job.page_size.bit_length() - 1, job.zero_tail, at_a_time, tile),
    )


@triton.jit
def flags_of(
    seq_lens,
    cu_seqlens,
    custom_mask,
    row,
    rows,
    live_rows,
    draft_tokens,
    TOKENS: tl.constexpr,
):
    """Load the flags of these rows: the draft tokens of its request that each one sees."""
    request = row // draft_tokens
    is_row = row < rows
    length = tl.load(seq_lens + request, mask=is_row, other=0).to(tl.int64)
    # each earlier request has draft_tokens rows of its prefix and draft_tokens flags
    earlier = tl.load(cu_seqlens + request, mask=is_row, other=0).to(tl.int64) + request.to(tl.int64) * draft_tokens
    first = draft_tokens * earlier + (row % draft_tokens) * (length + draft_tokens) + length
    token = tl.arange(0, TOKENS)[None, :]
    flag = tl.where((row < live_rows)[:, None], first[:, None] + token, 0)
    is_token = is_row[:, None] & (token < draft_tokens)
    return (tl.load(custom_mask + flag, mask=is_token, other=0) != 0).to(tl.int32), is_token, length


@launched(tables=0, numbers=5, warps=WARPS)
def verify_expand_kernel(
    seq_lens,
    cu_seqlens,
    req_pool_indices,
    req_to_token,
    custom_mask,
    cache_seqlens,
    cu_seqlens_k,
    cu_seqlens_q,
    page_table,
    req_stride,
    table_stride,
    rows,
    live_rows,
    draft_tokens,
    tokens,
    first_program,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    program = tl.program_id(0) + first_program
    if program == 0:
        tl.store(cu_seqlens_k, 0)
        seen_before = tl.full((), 0, tl.int32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            sees, _, _ = flags_of(seq_lens, cu_seqlens, custom_mask, row, rows, live_rows, draft_tokens, TOKENS)
            count = tl.sum(sees, 1)
            tl.store(cu_seqlens_k + 1 + row, seen_before + tl.cumsum(count, 0), mask=row < rows)
            seen_before += tl.sum(count, 0)
        return
    row = (program - 1) * ROWS + tl.arange(0, ROWS)
    if cu_seqlens_q is not None:
        tl.store(cu_seqlens_q + row, row, mask=row <= rows)
    is_row = row < rows
    sees, is_token, length = flags_of(seq_lens, cu_seqlens, custom_mask, row, rows, live_rows, draft_tokens, TOKENS)
    count = tl.sum(sees, 1)
    tl.store(cache_seqlens + row, count, mask=is_row)

    request = tl.load(req_pool_indices + row // draft_tokens, mask=is_row, other=0).to(tl.int64)
    token = tl.arange(0, TOKENS)[None, :]
    position = length[:, None] + token
    slots = req_to_token + request[:, None] * req_stride + position
    slot = tl.load(slots, mask=is_token & (position < tokens), other=0)
    seen_up_to = tl.cumsum(sees, 1)
    # unseen tokens follow; token + 1 - seen_up_to of them are up to here
    column = tl.where(sees != 0, seen_up_to - 1, count[:, None] + token - seen_up_to)
    tl.store(page_table + row.to(tl.int64)[:, None] * table_stride + column, slot, mask=is_token)


@launched(tables=0, numbers=1, warps=2 * WARPS)
def sums_kernel(counts, sums, rows, LENGTHS: tl.constexpr):
    tl.store(sums, 0)
    before = tl.full((), 0, tl.int32)
    for first in range(0, rows, LENGTHS):
        row = first + tl.arange(0, LENGTHS)
        count = tl.load(counts + row, mask=row < rows, other=0)
        tl.store(sums + 1 + row, before + tl.cumsum(count, 0), mask=row < rows)
        before += tl.sum(count, 0)


def verify_expand(job: VerifyExpand) -> None:
    rows, tile = job.cache_seqlens.shape[0], power_of_two(job.draft_tokens)
    at_a_time = max(1, FLAGS // tile)
    # one program recounts everything for the sums; if that would take long, a second launch sums the counts
    waits = rows * tile > FLAGS_OF_ONE_PROGRAM
    live_rows = rows if job.live_rows is None else job.live_rows
    verify_expand_kernel(
        rows // at_a_time + (1 if waits else 2),
        (
            job.seq_lens,
            job.cu_seqlens,
            job.req_pool_indices,
            job.req_to_token,
            job.custom_mask.view(torch.uint8),
            job.cache_seqlens,
            job.cu_seqlens_k,
            job.cu_seqlens_q,
            job.page_table,
        ),
        (job.req_to_token.stride(0), job.page_table.stride(0)),
        (rows, live_rows, job.draft_tokens, job.req_to_token.shape[1], 1 if waits else 0),
        (at_a_time, tile),
    )
    if waits:
        sums_kernel(1, (job.cache_seqlens, job.cu_seqlens_k), (), (rows,), (4 * LENGTHS,))


@launched(tables=2, numbers=5, warps=WARPS)
def local_attention_kernel(
    req_to_token,
    block_table,
    seq_lens,
    req_pool_indices,
    seqused,
    cu_seqlens_q,
    mapping,
    req_stride,
    table_stride,
    bs,
    tokens,
    width,
    chunk,
    share,
    SHIFT: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE_OUT: tl.constexpr,
):
    # the first program has no row: it writes the last sum, which is the only one if there are no requests
    program = tl.program_id(0) - 1
    if program < 0:
        if cu_seqlens_q is not None:
            tl.store(cu_seqlens_q + bs, bs)
        return
    row = program // share
    length = tl.load(seq_lens + row).to(tl.int32)
    request = tl.load(req_pool_indices + row).to(tl.int64)
    start = (tl.maximum(length - 1, 0) // chunk) * chunk
    used = length - start
    if program % share == 0:
        tl.store(seqused + row, used)
        if cu_seqlens_q is not None:
            tl.store(cu_seqlens_q + row, row)
    table = block_table + tl.multiple_of(row.to(tl.int64) * table_stride, WIDE_OUT)
    slots = req_to_token + request * req_stride + start
    live = live_pages(used, start, tokens, width, SHIFT)
    write_pages(
        table if mapping is None else None,
        None if mapping is None else table,
        slots,
        mapping,
        program % share,
        share,
        live,
        width,
        SHIFT,
        COLUMNS,
        ZERO_TAIL,
    )


def local_attention(job: LocalAttention) -> None:
    bs, width = job.seqused.shape[0], job.block_table.shape[1]
    columns = columns_at_a_time(job.page_size)
    share = programs_of_a_row(bs, width, columns, multiprocessors(job.seq_lens.device.index))
    strides = (job.req_to_token.stride(0), job.block_table.stride(0))
    local_attention_kernel(
        1 + bs * share,
        (
            job.req_to_token,
            job.block_table,
            job.seq_lens,
            job.req_pool_indices,
            job.seqused,
            job.cu_seqlens_q,
            job.mapping,
        ),
        strides,
        (bs, job.req_to_token.shape[1], width, job.chunk, share),
        (job.page_size.bit_length() - 1, job.zero_tail, columns, math.gcd(WIDEST, strides[1])),
    )


def columns_at_a_time(page_size: int) -> int:
    return COLUMNS_OF_SLOTS if page_size == 1 else COLUMNS_OF_PAGES


def programs_of_a_row(bs: int, width: int, columns: int, processors: int) -> int:
    wanted = -(-PROGRAMS_OF_A_MULTIPROCESSOR * processors // max(bs, 1))
    return max(1, min(wanted, -(-width // columns)))


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def multiprocessors(device: int | None) -> int:
    """Count the GPU's multiprocessors; Triton's interpreter runs as if it had two."""
    if device is None:
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
