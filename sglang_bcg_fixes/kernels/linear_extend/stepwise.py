# SPDX-License-Identifier: Apache-2.0
"""Shared by capturable references: tables, windows and the convolution, in plain torch and fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK, Tracking

# of a sequence: start, end, slot, whether the convolution continues from the slot's window; of its checkpoint: after
# how many tokens, into which slot (or -1)
FIELDS = 6


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Empty: there is nothing to tune."""


def tuning_for(rows_or_shape: Any) -> Tuning:
    return Tuning()


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Empty: nothing is kept between kernels."""

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Any, dtype: Any, tuning: Tuning) -> Scratch:
        return cls()


class Tables:
    """Static buffer for batches of up to `max_sequences` sequences and `max_tokens` tokens."""

    def __init__(
        self, max_tokens: int, max_sequences: int, device: Any, chunk: int = CHUNK, span: int | None = None
    ) -> None:
        self.max_tokens, self.max_sequences, self.chunk = max_tokens, max_sequences, chunk
        # zeros: a capture before the first step finds nothing to do
        self.sequences = torch.zeros(max_sequences, FIELDS, dtype=torch.int64, device=device)

    @property
    def buffers(self) -> tuple[Any, ...]:
        """Every buffer that a captured layer reads."""
        return (self.sequences,)

    def fill(self, lengths: Any, slots: Any, prefixes: Any, tracking: Tracking | None = None) -> None:
        """Fill for one step. Arguments are [sequences] of any integer type, on the device, and stay there."""
        given = lengths.shape[0]
        if given > self.max_sequences:
            raise ValueError(f"{given} sequences, but the tables were made for {self.max_sequences}")
        ends = lengths.long().clamp(min=0).cumsum(0)
        starts = functional.pad(ends[:-1], (1, 0)).clamp(max=self.max_tokens)
        ends = ends.clamp(max=self.max_tokens)
        after = track_slots = torch.full_like(ends, -1)
        if tracking is not None:
            covered = (tracking.lengths - prefixes).clamp(min=0).minimum(ends - starts)
            track_slots = torch.where(tracking.mask & (slots >= 0), tracking.slots.long(), -1)
            after = torch.where(track_slots >= 0, covered // tracking.unit * tracking.unit, -1)
        # the remaining sequences have no tokens
        self.sequences.zero_()
        self.sequences[:given] = torch.stack([starts, ends, slots.long(), (prefixes > 0).long(), after, track_slots], 1)


class Work:
    """The tables' work of each sequence and of each row, as tensors."""

    def __init__(self, rows: int, sequences: Any, past: int) -> None:
        self.start, self.end, self.slot, self.continued, self.after, self.track_slot = sequences.unbind(1)
        self.past = past
        self.works = (self.end > self.start) & (self.slot >= 0)
        self.rows = torch.arange(rows, device=sequences.device)
        of_sequence = (self.rows[:, None] >= self.start) & (self.rows[:, None] < self.end) & self.works
        self.is_live = of_sequence.any(1)
        self.sequence_of_row = of_sequence.int().argmax(1)

    @classmethod
    def of(cls, output: Any, tables: Tables, width: int) -> Work:
        rows = output.shape[0]
        if rows > tables.max_tokens:
            raise ValueError(f"an output of {rows} rows, but the tables were made for {tables.max_tokens} tokens")
        return cls(rows, tables.sequences, width - 1)

    def inputs(self, position: Any, sequence: Any, x: Any, conv: Any) -> Any:
        """Gather the inputs at these positions: from this step, from the slot's window, or zero."""
        before_start = position - self.start[sequence]
        moved = (self.past + before_start).clamp(0, self.past - 1)
        old = conv[self.slot[sequence].clamp(min=0), :, moved].float()
        old = torch.where((self.continued[sequence] != 0)[:, None], old, 0.0)
        return torch.where((before_start >= 0)[:, None], x[position.clamp(0, len(x) - 1)].float(), old)

    def keep_where(self, wanted: Any, slots: Any, pool: Any, values: Any) -> None:
        """Write values to the pool where wanted, its own elsewhere. One by one, as slots may be shared."""
        for number in range(len(slots)):
            index = slots[number : number + 1].clamp(min=0)
            had = pool.index_select(0, index)
            pool.index_copy_(0, index, torch.where(wanted[number], values[number : number + 1], had))


def convolved(work: Work, x: Any, weights: Any, bias: Any, conv: Any) -> Any:
    mixed = torch.zeros(len(work.rows), weights.shape[0], device=x.device)
    for tap in range(work.past + 1):
        taken = work.inputs(work.rows - work.past + tap, work.sequence_of_row, x, conv)
        mixed = mixed + taken * weights[:, tap].float()
    if bias is not None:
        mixed = mixed + bias.float()
    return torch.where(work.is_live[:, None], mixed, 0.0)


def turn_windows(work: Work, x: Any, conv: Any, tracking: bool) -> None:
    """Store the windows that the next step, and a step after the checkpoint, will need."""
    numbers = torch.arange(len(work.start), device=x.device)

    def window(end: Any) -> Any:
        return torch.stack([work.inputs(end - work.past + past, numbers, x, conv) for past in range(work.past)], 2)

    windows = window(work.end).to(conv.dtype)
    checkpoints = window(work.start + work.after).to(conv.dtype) if tracking else None
    work.keep_where(work.works, work.slot, conv, windows)
    if tracking:
        work.keep_where(work.works & (work.track_slot >= 0), work.track_slot, conv, checkpoints)


def walk(
    work: Work, current: Any, state: Any, output: Any, tracking: bool, advance: Callable[[int, Any], tuple[Any, Any]]
) -> None:
    """Go through the rows; `current` is one state a sequence, in fp32 until its end, which `advance` takes by a row."""
    if tracking:
        work.keep_where(work.works & (work.after == 0), work.track_slot, state, current.to(state.dtype))
    for row in range(output.shape[0]):
        here = work.sequence_of_row[row : row + 1]
        before = current.index_select(0, here)[0]
        after, read = advance(row, before)
        output[row].copy_(torch.where(work.is_live[row], read, 0.0))
        current.index_copy_(0, here, torch.where(work.is_live[row], after, before)[None])
        if tracking:
            ends = work.works & (work.start + work.after == row + 1) & (work.after > 0)
            rounded = after.to(state.dtype)
            work.keep_where(ends, work.track_slot, state, rounded[None].expand(len(ends), *after.shape))
    work.keep_where(work.works, work.slot, state, current.to(state.dtype))


def by_the_delta_rule(
    query: Any, key: Any, value: Any, decay: Any, gain: Any, row: int, before: Any
) -> tuple[Any, Any]:
    decayed = before * decay[row]
    wanted = value[row] - (decayed * key[row, :, None]).sum(-1)
    after = decayed + (wanted * gain[row])[..., None] * key[row, :, None]
    return after, (after * query[row, :, None]).sum(-1)
