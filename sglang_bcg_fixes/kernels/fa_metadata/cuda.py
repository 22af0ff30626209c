# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's metadata in CUDA C++, csrc/fa_metadata: one launch each, at least host cost."""

from __future__ import annotations

import dataclasses
import functools
import struct

import torch

from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.kernels.cuda.driver import Launch
from sglang_bcg_fixes.kernels.fa_metadata.jobs import DraftExpand, FaMetadata, LocalAttention, VerifyExpand
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM
from sglang_bcg_fixes.model import Accepted, Rejected

Tensor = torch.Tensor
I64 = torch.int64

# the header's structs: pointers, strides, numbers, and padding to a multiple of eight bytes
FA_METADATA = struct.Struct("13Q3q13i0q")
DRAFT_EXPAND = struct.Struct("6Qq7i0q")
VERIFY_EXPAND = struct.Struct("9Q2q6i0q")
LOCAL_ATTENTION = struct.Struct("7Q2q8i0q")

# the same in the header; a test compares them
THREADS = 128
VERIFY_THREADS = 256
WARP = 32
WHOLE_WARP, WHOLE_BLOCK = WARP.bit_length() - 1, THREADS.bit_length() - 1
WIDE_SEQ_LENS, WIDE_REQ_POOL_INDICES, WIDE_ROW_START, WIDE_EXTEND_LENS, WIDE_OUT_CACHE_LOC = 1, 2, 4, 8, 16
DROP_LAST, ZERO_TAIL = 32, 64

# columns that a thread has in flight: copied or translated 16 bytes at a time, or gathered
COPIED, TRANSLATED, GATHERED = 16, 8, 4
# per multiprocessor: enough to saturate memory, and no more, since idle blocks cost time when rows are short
BUSY_THREADS = 512
# up to so many flags the sums recount them in parallel with the rows; above, a second launch sums the rows' counts
MOST_FLAGS_COUNTED_TWICE = 8192


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The launchers of one device, and the number of threads that saturates it."""

    fa_metadata: Launch
    draft_expand: Launch
    verify_expand: Launch
    local_attention: Launch
    busy_threads: int


def ready(device: int) -> Accepted | Rejected:
    """Compile and load for the device; must be called before the first capture."""
    return program.ready(lambda: on_device(device))


def origin(device: int) -> str:
    """Name the source of the machine code, for the log."""
    return program.load(PROGRAM, device).origin


@functools.cache
def on_device(device: int) -> Kernels:
    launcher = program.load(PROGRAM, device).launcher
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(
        fa_metadata=launcher("bcg_fa_metadata", THREADS, FA_METADATA),
        draft_expand=launcher("bcg_draft_expand", THREADS, DRAFT_EXPAND),
        verify_expand=launcher("bcg_verify_expand", VERIFY_THREADS, VERIFY_EXPAND),
        local_attention=launcher("bcg_local_attention", THREADS, LOCAL_ATTENTION),
        busy_threads=BUSY_THREADS * multiprocessors,
    )


def fa_metadata(job: FaMetadata) -> None:
    kernels = on_device(job.cache_seqlens.get_device())
    bs = job.cache_seqlens.shape[0]
    flags = job.drop_last * DROP_LAST + job.zero_tail * ZERO_TAIL
    if job.seq_lens.dtype is I64:
        flags += WIDE_SEQ_LENS
    if job.req_pool_indices.dtype is I64:
        flags += WIDE_REQ_POOL_INDICES
    if job.row_start is not None and job.row_start.dtype is I64:
        flags += WIDE_ROW_START
    if job.extend_lens is not None and job.extend_lens.dtype is I64:
        flags += WIDE_EXTEND_LENS
    width = row_blocks = stride = swa_stride = new_tokens = swa_out_length = swa_blocks = 0
    team_shift, teams = 0, 1
    if job.page_table is not None:
        width, stride = job.page_table.shape[1], job.page_table.stride()[0]
        at_once = columns_at_once(job.page_size, job.swa_page_table)
        team_shift, teams, row_blocks = shared_rows(kernels.busy_threads, bs, width, at_once)
    if job.swa_page_table is not None:
        swa_stride = job.swa_page_table.stride()[0]
    if job.out_cache_loc is not None and job.swa_out_cache_loc is not None:
        new_tokens, swa_out_length = job.out_cache_loc.shape[0], job.swa_out_cache_loc.shape[0]
        swa_blocks = -(-swa_out_length // THREADS)
        if job.out_cache_loc.dtype is I64:
            flags += WIDE_OUT_CACHE_LOC
    lengths, written = job.seq_lens.data_ptr(), job.cache_seqlens.data_ptr()
    fields = (
        lengths,
        job.req_pool_indices.data_ptr(),
        job.req_to_token.data_ptr(),
        address(job.row_start),
        address(job.extend_lens),
        address(job.mapping),
        address(job.out_cache_loc),
        written,
        address(job.cu_seqlens_k),
        address(job.cu_seqlens_q),
        address(job.page_table),
        address(job.swa_page_table),
        address(job.swa_out_cache_loc),
        job.req_to_token.stride()[0],
        stride,
        swa_stride,
        job.req_to_token.shape[1],
        width,
        bs,
        job.page_size.bit_length() - 1,
        job.delta,
        job.q_stride,
        new_tokens,
        swa_out_length,
    )
    other_blocks = row_blocks + swa_blocks
    if lengths == written and (job.delta or job.drop_last) and other_blocks:
        # otherwise rows would read lengths that the block of sums rewrites
        kernels.fa_metadata(other_blocks, *fields, 0, row_blocks, team_shift, teams, flags)
        kernels.fa_metadata(1, *fields, 1, 0, team_shift, teams, flags)
    else:
        kernels.fa_metadata(1 + other_blocks, *fields, 1, row_blocks, team_shift, teams, flags)


def draft_expand(job: DraftExpand) -> None:
    bs = job.cache_seqlens.shape[0]
    flags = is_wide(job.seq_lens) * WIDE_SEQ_LENS | is_wide(job.out_cache_loc) * WIDE_OUT_CACHE_LOC
    on_device(job.cache_seqlens.get_device()).draft_expand(
        max(1, -(-bs * WARP // THREADS)),
        job.seq_lens.data_ptr(),
        job.out_cache_loc.data_ptr(),
        job.cache_seqlens.data_ptr(),
        job.page_table.data_ptr(),
        address(job.cu_seqlens_q),
        address(job.cu_seqlens_k),
        job.page_table.stride()[0],
        job.page_table.shape[1],
        bs,
        job.page_size.bit_length() - 1,
        job.topk,
        job.steps,
        job.length,
        flags | job.zero_tail * ZERO_TAIL,
    )


def verify_expand(job: VerifyExpand) -> None:
    kernels = on_device(job.cache_seqlens.get_device())
    bs, counts, sums = job.cache_seqlens.shape[0], job.cache_seqlens.data_ptr(), job.cu_seqlens_k.data_ptr()
    waits = bs * job.draft_tokens > MOST_FLAGS_COUNTED_TWICE
    sum_blocks = 0 if waits else 1
    kernels.verify_expand(
        sum_blocks - (-bs * WARP // VERIFY_THREADS),
        job.seq_lens.data_ptr(),
        job.cu_seqlens.data_ptr(),
        job.req_pool_indices.data_ptr(),
        job.req_to_token.data_ptr(),
        job.custom_mask.data_ptr(),
        counts,
        sums,
        address(job.cu_seqlens_q),
        job.page_table.data_ptr(),
        job.req_to_token.stride()[0],
        job.page_table.stride()[0],
        job.req_to_token.shape[1],
        bs,
        job.draft_tokens,
        bs if job.live_rows is None else job.live_rows,
        sum_blocks,
        is_wide(job.seq_lens) * WIDE_SEQ_LENS | is_wide(job.req_pool_indices) * WIDE_REQ_POOL_INDICES,
    )
    if waits:
        # sums of the counts, passed as lengths that stay as they are
        tensors, strides = (counts, 0, 0, 0, 0, 0, 0, counts, sums, 0, 0, 0, 0), (0, 0, 0)
        numbers, one_block_of_sums = (0, 0, bs, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0)
        kernels.fa_metadata(1, *tensors, *strides, *numbers, *one_block_of_sums)


def local_attention(job: LocalAttention) -> None:
    kernels = on_device(job.seqused.get_device())
    bs, width = job.seqused.shape[0], job.block_table.shape[1]
    at_once = columns_at_once(job.page_size, job.mapping)
    team_shift, teams, row_blocks = shared_rows(kernels.busy_threads, bs, width, at_once)
    flags = is_wide(job.seq_lens) * WIDE_SEQ_LENS | is_wide(job.req_pool_indices) * WIDE_REQ_POOL_INDICES
    kernels.local_attention(
        max(1, row_blocks),
        job.seq_lens.data_ptr(),
        job.req_pool_indices.data_ptr(),
        job.req_to_token.data_ptr(),
        address(job.mapping),
        job.seqused.data_ptr(),
        job.block_table.data_ptr(),
        address(job.cu_seqlens_q),
        job.req_to_token.stride()[0],
        job.block_table.stride()[0],
        job.req_to_token.shape[1],
        width,
        bs,
        job.page_size.bit_length() - 1,
        job.chunk,
        team_shift,
        teams,
        flags | job.zero_tail * ZERO_TAIL,
    )


def columns_at_once(page_size: int, window: Tensor | None) -> int:
    if page_size > 1:
        return GATHERED
    return COPIED if window is None else TRANSLATED


def shared_rows(busy_threads: int, bs: int, width: int, at_once: int) -> tuple[int, int, int]:
    """Return log2 of the threads of a team, the teams that share a row, and the number of blocks.

    They depend on shapes alone, so a captured launch is right for any lengths.
    """
    if not bs:
        return 0, 1, 0
    threads = busy_threads // bs
    if threads >= THREADS:
        teams = max(1, min(threads // THREADS, -(-width // (at_once * THREADS))))
        return WHOLE_BLOCK, teams, bs * teams
    shift = max(WHOLE_WARP, threads.bit_length() - 1)
    return shift, 1, -(-(bs << shift) // THREADS)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def is_wide(tensor: Tensor) -> bool:
    return tensor.dtype is I64
