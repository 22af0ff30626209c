# SPDX-License-Identifier: Apache-2.0
"""Work tables of a step, in device buffers that never move, filled by one launch without a sync."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

# of a chunk: first row, its sequence's start, end, slot, whether the convolution continues from the slot's window, and
# the checkpoint as below
CHUNK_FIELDS = 8
# of a sequence: start, end, slot; of its checkpoint: after how many tokens, into which slot (or -1); its first chunk;
# whether it has a prefix
SEQUENCE_FIELDS = 8
# chunks, tokens, sequences to advance
COUNTS = 4
CHUNK = 64
# chunks, and sequences, that one program writes: it holds a matrix of them and of all sequences
ROWS = 16
# these are given parts of larger tensors, whose addresses have another alignment in another batch; a server must not
# stop to compile for it
OF_BATCHES = ("lengths", "slots", "prefixes", "track_mask", "track_slots", "track_lengths")


@triton.jit(do_not_specialize=["given"], do_not_specialize_on_alignment=OF_BATCHES)
def _fill(
    lengths,
    slots,
    prefixes,
    track_mask,
    track_slots,
    track_lengths,
    of_chunks,
    of_sequences,
    counts,
    given,
    max_chunks,
    max_tokens,
    track_unit,
    bounds,
    span,
    TRACK: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr,
    SEQUENCE_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """Scan all sequences in every program, which writes its rows of chunks and of sequences."""
    number = tl.arange(0, MAX_SEQUENCES)
    here = number < given
    length = tl.maximum(tl.load(lengths + number, mask=here, other=0).to(tl.int32), 0)
    slot = tl.load(slots + number, mask=here, other=-1).to(tl.int32)
    prefix = tl.load(prefixes + number, mask=here, other=0).to(tl.int32)
    # the host has checked the lengths; clamp anyway, so nothing is written past the buffers
    end = tl.minimum(tl.cumsum(length, 0), max_tokens)
    start = tl.minimum(tl.cumsum(length, 0) - length, max_tokens)
    length = end - start
    all_work = tl.where(slot >= 0, length, 0)
    chunk_end = tl.cumsum(tl.cdiv(length, CHUNK), 0)
    chunk_start = chunk_end - tl.cdiv(length, CHUNK)
    total_chunks = tl.sum(tl.cdiv(length, CHUNK), 0)

    track_after = tl.full([MAX_SEQUENCES], -1, tl.int32)
    track_slot = tl.full([MAX_SEQUENCES], -1, tl.int32)
    if TRACK:
        tracked = tl.load(track_mask + number, mask=here & (slot >= 0), other=0) != 0
        past = tl.load(track_lengths + number, mask=tracked, other=0).to(tl.int32) - prefix
        track_slot = tl.load(track_slots + number, mask=tracked, other=-1).to(tl.int32)
        # never past the sequence, and no checkpoint without a slot
        after = tl.minimum(tl.maximum(past, 0), length) // track_unit * track_unit
        track_after = tl.where(track_slot >= 0, after, -1)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_row = (row[:, None] >= chunk_start[None, :]) & (row[:, None] < chunk_end[None, :])
    row_start = tl.sum(tl.where(of_row, start[None, :], 0), 1)
    row_chunk = row - tl.sum(tl.where(of_row, chunk_start[None, :], 0), 1)
    of_row_chunk = of_chunks + row * CHUNK_FIELDS
    is_chunk = (row < total_chunks) & (row < max_chunks)
    tl.store(of_row_chunk, row_start + row_chunk * CHUNK, mask=is_chunk)
    tl.store(of_row_chunk + 1, row_start, mask=is_chunk)
    tl.store(of_row_chunk + 2, tl.sum(tl.where(of_row, end[None, :], 0), 1), mask=is_chunk)
    tl.store(of_row_chunk + 3, tl.sum(tl.where(of_row, slot[None, :], 0), 1), mask=is_chunk)
    tl.store(of_row_chunk + 4, tl.sum(tl.where(of_row & (prefix > 0)[None, :], 1, 0), 1), mask=is_chunk)
    tl.store(of_row_chunk + 5, tl.sum(tl.where(of_row, track_after[None, :], 0), 1), mask=is_chunk)
    tl.store(of_row_chunk + 6, tl.sum(tl.where(of_row, track_slot[None, :], 0), 1), mask=is_chunk)

    if tl.program_id(0) == 0:
        tl.store(counts, tl.minimum(total_chunks, max_chunks))
        tl.store(counts + 1, tl.sum(length, 0))
        # number of chunks that begin before each span
        bound = tl.arange(0, BOUNDS)
        before_bound = tl.cdiv(tl.maximum(bound[:, None] * span - start[None, :], 0), CHUNK)
        begun = tl.sum(tl.minimum(before_bound, tl.cdiv(length, CHUNK)[None, :]), 1)
        tl.store(bounds + bound, tl.minimum(begun, max_chunks))
        tl.store(counts + 2, tl.sum((all_work > 0).to(tl.int32), 0))

    if tl.program_id(0) * ROWS < MAX_SEQUENCES:
        own = row[:, None] == number[None, :]
        work = tl.sum(tl.where(own, all_work[None, :], 0), 1)
        # longest first: their programs end last
        before = (all_work[None, :] > work[:, None]) | (
            (all_work[None, :] == work[:, None]) & (number[None, :] < row[:, None])
        )
        of_rank = of_sequences + tl.sum(before.to(tl.int32), 1) * SEQUENCE_FIELDS
        # sequences without work rank last and are never read
        works = work > 0
        tl.store(of_rank, tl.sum(tl.where(own, start[None, :], 0), 1), mask=works)
        tl.store(of_rank + 1, tl.sum(tl.where(own, end[None, :], 0), 1), mask=works)
        tl.store(of_rank + 2, tl.sum(tl.where(own, slot[None, :], 0), 1), mask=works)
        tl.store(of_rank + 3, tl.sum(tl.where(own, track_after[None, :], 0), 1), mask=works)
        tl.store(of_rank + 4, tl.sum(tl.where(own, track_slot[None, :], 0), 1), mask=works)
        tl.store(of_rank + 5, tl.sum(tl.where(own, chunk_start[None, :], 0), 1), mask=works)
        tl.store(of_rank + 6, tl.sum(tl.where(own & (prefix > 0)[None, :], 1, 0), 1), mask=works)


@dataclasses.dataclass(frozen=True)
class Tracking:
    """Checkpoints for the prefix cache: SGLang's mamba_track_mask, _indices and _seqlens."""

    mask: Any
    slots: Any
    lengths: Any
    # SGLang's mamba_cache_chunk_size: a multiple of the kernels' chunk
    unit: int = CHUNK


class Tables:
    """Static buffers for batches of up to `max_sequences` sequences and `max_tokens` tokens.

    Tokens are processed in spans, one after the other, so the scratch between the kernels holds one span only.
    """

    def __init__(
        self, max_tokens: int, max_sequences: int, device: Any, chunk: int = CHUNK, span: int | None = None
    ) -> None:
        self.span = span or max_tokens
        # the last bound is open: all chunks begin before the tokens end
        bounds = triton.next_power_of_2(triton.cdiv(max_tokens, self.span) + 1)
        self.bounds = torch.zeros(bounds, dtype=torch.int32, device=device)
        self.max_tokens, self.max_sequences, self.chunk = max_tokens, max_sequences, chunk
        self.max_chunks = self.chunks_of(max_tokens)
        # zeros: a capture before the first step finds nothing to do
        self.chunks = torch.zeros(self.max_chunks, CHUNK_FIELDS, dtype=torch.int32, device=device)
        self.sequences = torch.zeros(max_sequences, SEQUENCE_FIELDS, dtype=torch.int32, device=device)
        self.counts = torch.zeros(COUNTS, dtype=torch.int32, device=device)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Every buffer that a captured launch reads."""
        return self.chunks, self.sequences, self.bounds, self.counts

    def chunks_of(self, tokens: int) -> int:
        """Bound the chunks of so many tokens: each sequence may end in a partial one, and none is empty."""
        return min(tokens // self.chunk + self.max_sequences, tokens)

    def fill(self, lengths: Any, slots: Any, prefixes: Any, tracking: Tracking | None = None) -> None:
        """Fill for one step. Arguments are [sequences] of any integer type, on the device, and stay there."""
        sequences = lengths.shape[0]
        if sequences > self.max_sequences:
            raise ValueError(f"{sequences} sequences, but the tables were made for {self.max_sequences}")
        grid = (triton.cdiv(max(self.max_chunks, self.max_sequences), ROWS),)
        _fill[grid](
            lengths,
            slots,
            prefixes,
            tracking and tracking.mask,
            tracking and tracking.slots,
            tracking and tracking.lengths,
            self.chunks,
            self.sequences,
            self.counts,
            sequences,
            self.max_chunks,
            self.max_tokens,
            tracking.unit if tracking else self.chunk,
            self.bounds,
            self.span,
            TRACK=tracking is not None,
            MAX_SEQUENCES=triton.next_power_of_2(self.max_sequences),
            CHUNK=self.chunk,
            CHUNK_FIELDS=CHUNK_FIELDS,
            SEQUENCE_FIELDS=SEQUENCE_FIELDS,
            ROWS=ROWS,
            BOUNDS=len(self.bounds),
        )
