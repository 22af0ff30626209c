"""FlashAttention's metadata in CUDA C++: csrc/fa_metadata/fa_metadata.cuh, a launch each, at the least host cost."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable

import torch

from sglang_bcg_fixes.kernels.cuda import driver, program
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM
from sglang_bcg_fixes.model import Accepted, Rejected

Tensor = torch.Tensor
Launch = Callable[..., None]
I64 = torch.int64

# the structs of the header: pointers, strides, numbers, and what pads C's struct to a multiple of eight bytes
FA_METADATA = struct.Struct("13Q3q13i0q")
DRAFT_EXPAND = struct.Struct("6Qq7i0q")
VERIFY_EXPAND = struct.Struct("9Q2q6i0q")
LOCAL_ATTENTION = struct.Struct("7Q2q8i0q")

# these are the header's too
THREADS = 128
VERIFY_THREADS = 256
WARP = 32
WHOLE_WARP, WHOLE_BLOCK = WARP.bit_length() - 1, THREADS.bit_length() - 1
WIDE_SEQ_LENS, WIDE_REQ_POOL_INDICES, WIDE_ROW_START, WIDE_EXTEND_LENS, WIDE_OUT_CACHE_LOC = 1, 2, 4, 8, 16
DROP_LAST, ZERO_TAIL = 32, 64

# columns of a row that a thread reads before it writes: copied or translated 16 bytes at a time, or gathered
COPIED, TRANSLATED, GATHERED = 16, 8, 4
# of a multiprocessor: enough to keep memory busy, and no more, since each costs time where rows are short
BUSY_THREADS = 512
# flags of draft tokens; the sums count them once more beside the rows, or wait for the rows in a launch of their own
MOST_FLAGS_COUNTED_TWICE = 8192


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The launches of one device, and how many threads keep it busy."""

    fa_metadata: Launch
    draft_expand: Launch
    verify_expand: Launch
    local_attention: Launch
    busy_threads: int


def ready(device: int) -> Accepted | Rejected:
    """Compiles and loads what the device needs; to be asked before the first capture."""
    return program.ready(lambda: on_device(device))


def origin(device: int) -> str:
    """Where the machine code came from, for the log."""
    return program.load(PROGRAM, device).origin


@functools.cache
def on_device(device: int) -> Kernels:
    functions = program.load(PROGRAM, device).functions
    stream = functools.partial(torch._C._cuda_getCurrentRawStream, device)

    def launch(name: str, threads: int, layout: struct.Struct) -> Launch:
        return driver.launcher(functions[name], threads, layout, stream)

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(
        fa_metadata=launch("bcg_fa_metadata", THREADS, FA_METADATA),
        draft_expand=launch("bcg_draft_expand", THREADS, DRAFT_EXPAND),
        verify_expand=launch("bcg_verify_expand", VERIFY_THREADS, VERIFY_EXPAND),
        local_attention=launch("bcg_local_attention", THREADS, LOCAL_ATTENTION),
        busy_threads=BUSY_THREADS * multiprocessors,
    )


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
    kernels = on_device(cache_seqlens.get_device())
    bs = cache_seqlens.shape[0]
    flags = drop_last * DROP_LAST + zero_tail * ZERO_TAIL
    if seq_lens.dtype is I64:
        flags += WIDE_SEQ_LENS
    if req_pool_indices.dtype is I64:
        flags += WIDE_REQ_POOL_INDICES
    if row_start is not None and row_start.dtype is I64:
        flags += WIDE_ROW_START
    if extend_lens is not None and extend_lens.dtype is I64:
        flags += WIDE_EXTEND_LENS
    width = row_blocks = stride = swa_stride = new_tokens = swa_out_length = swa_blocks = 0
    team_shift, teams = 0, 1
    if page_table is not None:
        width, stride = page_table.shape[1], page_table.stride()[0]
        at_once = columns_at_once(page_size, swa_page_table)
        team_shift, teams, row_blocks = shared_rows(kernels.busy_threads, bs, width, at_once)
    if swa_page_table is not None:
        swa_stride = swa_page_table.stride()[0]
    if out_cache_loc is not None and swa_out_cache_loc is not None:
        new_tokens, swa_out_length = out_cache_loc.shape[0], swa_out_cache_loc.shape[0]
        swa_blocks = -(-swa_out_length // THREADS)
        if out_cache_loc.dtype is I64:
            flags += WIDE_OUT_CACHE_LOC
    lengths, written = seq_lens.data_ptr(), cache_seqlens.data_ptr()
    fields = (
        lengths,
        req_pool_indices.data_ptr(),
        req_to_token.data_ptr(),
        address(row_start),
        address(extend_lens),
        address(mapping),
        address(out_cache_loc),
        written,
        address(cu_seqlens_k),
        address(cu_seqlens_q),
        address(page_table),
        address(swa_page_table),
        address(swa_out_cache_loc),
        req_to_token.stride()[0],
        stride,
        swa_stride,
        req_to_token.shape[1],
        width,
        bs,
        page_size.bit_length() - 1,
        delta,
        q_stride,
        new_tokens,
        swa_out_length,
    )
    other_blocks = row_blocks + swa_blocks
    if lengths == written and (delta or drop_last) and other_blocks:
        # rows would read the lengths that the sums rewrite
        kernels.fa_metadata(other_blocks, *fields, 0, row_blocks, team_shift, teams, flags)
        kernels.fa_metadata(1, *fields, 1, 0, team_shift, teams, flags)
    else:
        kernels.fa_metadata(1 + other_blocks, *fields, 1, row_blocks, team_shift, teams, flags)


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
    bs = cache_seqlens.shape[0]
    on_device(cache_seqlens.get_device()).draft_expand(
        max(1, -(-bs * WARP // THREADS)),
        seq_lens.data_ptr(),
        out_cache_loc.data_ptr(),
        cache_seqlens.data_ptr(),
        page_table.data_ptr(),
        address(cu_seqlens_q),
        address(cu_seqlens_k),
        page_table.stride()[0],
        page_table.shape[1],
        bs,
        page_size.bit_length() - 1,
        topk,
        steps,
        length,
        is_wide(seq_lens) * WIDE_SEQ_LENS | is_wide(out_cache_loc) * WIDE_OUT_CACHE_LOC | zero_tail * ZERO_TAIL,
    )


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
    kernels = on_device(cache_seqlens.get_device())
    bs, counts, sums = cache_seqlens.shape[0], cache_seqlens.data_ptr(), cu_seqlens_k.data_ptr()
    waits = bs * draft_tokens > MOST_FLAGS_COUNTED_TWICE
    sum_blocks = 0 if waits else 1
    kernels.verify_expand(
        sum_blocks - (-bs * WARP // VERIFY_THREADS),
        seq_lens.data_ptr(),
        cu_seqlens.data_ptr(),
        req_pool_indices.data_ptr(),
        req_to_token.data_ptr(),
        custom_mask.data_ptr(),
        counts,
        sums,
        address(cu_seqlens_q),
        page_table.data_ptr(),
        req_to_token.stride()[0],
        page_table.stride()[0],
        req_to_token.shape[1],
        bs,
        draft_tokens,
        bs if live_rows is None else live_rows,
        sum_blocks,
        is_wide(seq_lens) * WIDE_SEQ_LENS | is_wide(req_pool_indices) * WIDE_REQ_POOL_INDICES,
    )
    if waits:
        # of the counts, which are lengths that stay as they are
        tensors, strides = (counts, 0, 0, 0, 0, 0, 0, counts, sums, 0, 0, 0, 0), (0, 0, 0)
        numbers, one_block_of_sums = (0, 0, bs, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0)
        kernels.fa_metadata(1, *tensors, *strides, *numbers, *one_block_of_sums)


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
    kernels = on_device(seqused.get_device())
    bs, width = seqused.shape[0], block_table.shape[1]
    at_once = columns_at_once(page_size, mapping)
    team_shift, teams, row_blocks = shared_rows(kernels.busy_threads, bs, width, at_once)
    kernels.local_attention(
        max(1, row_blocks),
        seq_lens.data_ptr(),
        req_pool_indices.data_ptr(),
        req_to_token.data_ptr(),
        address(mapping),
        seqused.data_ptr(),
        block_table.data_ptr(),
        address(cu_seqlens_q),
        req_to_token.stride()[0],
        block_table.stride()[0],
        req_to_token.shape[1],
        width,
        bs,
        page_size.bit_length() - 1,
        chunk,
        team_shift,
        teams,
        is_wide(seq_lens) * WIDE_SEQ_LENS | is_wide(req_pool_indices) * WIDE_REQ_POOL_INDICES | zero_tail * ZERO_TAIL,
    )


def columns_at_once(page_size: int, window: Tensor | None) -> int:
    if page_size > 1:
        return GATHERED
    return COPIED if window is None else TRANSLATED


def shared_rows(busy_threads: int, bs: int, width: int, at_once: int) -> tuple[int, int, int]:
    """How many threads are a team (as a power of two), how many teams share a row, and how many blocks that makes.

    From shapes alone, so that a captured launch is right for any lengths.
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
