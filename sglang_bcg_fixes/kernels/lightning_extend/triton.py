# SPDX-License-Identifier: Apache-2.0
"""Extend of lightning attention in three Triton kernels, with the same launches for every batch of a captured graph.

`relate` is parallel over chunks: q_i.k_j with their decay, once for all parts of a head. `advance` walks along each
sequence, a part of the values of a head at a time: state and output, without sums of parts in memory. `clear` zeroes
the rows without a token. They read their work from the tables on the device. A chunk begins where its sequence does, so
nothing depends on neighbours.

Per chunk, with s the decay of a head and S [key, value] the state before it:

    output_i = scale (exp(-(i + 1) s) q_i S + sum_j<=i exp(-(i - j) s) (q_i.k_j) v_j)
    S after it = exp(-n s) S + sum_j exp(-(n - 1 - j) s) k_j^T v_j       for its n tokens

No exponent is ever positive. `advance` keeps values as the rows of S and of the output, so that queries and keys are
right operands as they are loaded. What is in fp32 is multiplied by bfloat16 in two halves of bfloat16, which have more
digits than TF32, and by everything else as TF32, as in SGLang's kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.convolution import LOG2_E
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK_FIELDS, SEQUENCE_FIELDS, Tables
from sglang_bcg_fixes.kernels.linear_extend.walks import MULTIPROCESSORS, Walk, launches, of_few_sequences, walked
from sglang_bcg_fixes.model import Accepted, Rejected

__all__ = ["Scratch", "Tables", "Tuning", "can_keep_checkpoints", "extend", "ready", "tuning_for"]


@triton.jit
def _product(wide, given, SPLIT: tl.constexpr):
    """Multiply fp32 numbers by what a layer is given, in halves of bfloat16 or as TF32."""
    if SPLIT:
        high = wide.to(given.dtype)
        low = (wide - high.to(tl.float32)).to(given.dtype)
        found = tl.dot(low, given, acc=tl.dot(high, given))
    else:
        found = tl.dot(wide, given.to(tl.float32))
    return found


@triton.jit(do_not_specialize=["rows_of_output", "max_chunks"])
def relate(
    q,
    k,
    decay,
    near,
    chunks,
    counts,
    rows_of_output,
    max_chunks,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Process work items: products of a head's queries and keys in a chunk, in the form in which values take them."""
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    in_chunk = tl.arange(0, CHUNK)
    key = tl.arange(0, HEAD)
    # [from, to]
    gap = in_chunk[None, :] - in_chunk[:, None]
    for item in range(tl.program_id(0), real_chunks * HEADS, tl.num_programs(0)):
        head = item % HEADS
        of_chunk = chunks + (item // HEADS) * FIELDS
        rows = tl.load(of_chunk) + in_chunk
        is_real = (rows < tl.minimum(tl.load(of_chunk + 2), rows_of_output))[:, None]
        if tl.load(of_chunk + 3) >= 0:
            rate = tl.load(decay + head) * LOG2_E
            weight = tl.exp2(tl.where(gap >= 0, -rate * gap, -float("inf")))
            row = rows.to(tl.int64)[:, None]
            queries = tl.load(q + row * Q_ROW + (head * HEAD + key)[None, :], mask=is_real, other=0.0)
            keys = tl.load(k + row * K_ROW + (head * HEAD + key)[None, :], mask=is_real, other=0.0)
            found = tl.dot(keys, tl.trans(queries)) * weight
            of_near = near + (head * rows_of_output + rows).to(tl.int64)[:, None] * CHUNK + in_chunk[None, :]
            high = found.to(near.dtype.element_ty)
            tl.store(of_near, high, mask=is_real)
            if SPLIT:
                low = (found - high.to(tl.float32)).to(near.dtype.element_ty)
                tl.store(of_near + rows_of_output.to(tl.int64) * (HEADS * CHUNK), low, mask=is_real)


@triton.jit(do_not_specialize=["rows_of_output", "scale", "least_sequences", "most_sequences"])
def advance(
    q,
    k,
    v,
    near,
    decay,
    output,
    state,
    sequences,
    counts,
    state_slot,
    rows_of_output,
    scale,
    least_sequences,
    most_sequences,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    TRACK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Process work items: PART values of a head of a sequence, longest sequences first.

    Do nothing unless the step has from least_sequences to most_sequences.
    """
    PARTS: tl.constexpr = HEAD // PART
    items = walked(counts, least_sequences, most_sequences) * (HEADS * PARTS)
    in_chunk = tl.arange(0, CHUNK)
    key = tl.arange(0, HEAD)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        of_sequence = sequences + (item // (HEADS * PARTS)) * FIELDS
        start = tl.load(of_sequence)
        end = tl.minimum(tl.load(of_sequence + 1), rows_of_output)
        slot = tl.load(of_sequence + 2).to(tl.int64)
        has_prefix = tl.load(of_sequence + 6) != 0
        head = (item // PARTS) % HEADS
        value = (item % PARTS) * PART + tl.arange(0, PART)
        of_state = state + slot * state_slot + (head * HEAD + key)[None, :] * HEAD + value[:, None]
        rate = tl.load(decay + head) * LOG2_E
        from_start = tl.exp2(-rate * (in_chunk + 1))
        # a checkpoint splits the walk in two
        middle = start
        track_slot = slot
        if TRACK:
            middle += tl.maximum(tl.load(of_sequence + 3), 0)
            track_slot = tl.load(of_sequence + 4).to(tl.int64)
        S = tl.load(of_state, mask=has_prefix & (start < end), other=0.0).to(tl.float32)
        for piece in range(2 if TRACK else 1):
            first = start
            last_row = end
            if TRACK:
                first = tl.where(piece == 0, start, middle)
                last_row = tl.where(piece == 0, tl.minimum(end, middle), end)
            for first_row in tl.range(first, last_row, CHUNK, num_stages=STAGES):
                rows = first_row + in_chunk
                is_real = (rows < end)[:, None]
                row = rows.to(tl.int64)[:, None]
                queries = tl.load(q + row * Q_ROW + (head * HEAD + key)[None, :], mask=is_real, other=0.0)
                keys = tl.load(k + row * K_ROW + (head * HEAD + key)[None, :], mask=is_real, other=0.0)
                values = tl.load(v + row * V_ROW + (head * HEAD + value)[None, :], mask=is_real, other=0.0)
                values = tl.trans(values)
                # [from, to]
                of_near = near + (head * rows_of_output + rows).to(tl.int64)[:, None] * CHUNK + in_chunk[None, :]
                high = tl.load(of_near, mask=is_real, other=0.0)
                count = tl.minimum(end - first_row, CHUNK)
                to_end = tl.exp2(-rate * tl.maximum(count - 1 - in_chunk, 0))
                left = values.to(tl.float32) * to_end[None, :]
                found = _product(S, tl.trans(queries), SPLIT) * from_start[None, :]
                if SPLIT:
                    low = tl.load(of_near + rows_of_output.to(tl.int64) * (HEADS * CHUNK), mask=is_real, other=0.0)
                    found = (found + tl.dot(values, low, acc=tl.dot(values, high))) * scale
                else:
                    found = (found + tl.dot(values.to(tl.float32), high)) * scale
                S = S * tl.exp2(-rate * count) + _product(left, keys, SPLIT)
                of_output = output + row * (HEADS * HEAD) + (head * HEAD + value)[None, :]
                tl.store(of_output, tl.trans(found).to(output.dtype.element_ty), mask=is_real)
            if TRACK and (piece == 0) & (track_slot >= 0) & (start < end):
                tl.store(of_state + (track_slot - slot) * state_slot, S.to(state.dtype.element_ty))
        if start < end:
            tl.store(of_state, S.to(state.dtype.element_ty))


@triton.jit(do_not_specialize=["rows_of_output", "max_chunks"])
def clear(
    output,
    chunks,
    counts,
    rows_of_output,
    max_chunks,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Zero the rows of sequences without a slot, chunk by chunk, and those behind the last token."""
    TILES: tl.constexpr = INNER // TILE
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    tail = tl.load(counts + 1)
    behind = tl.cdiv(tl.maximum(rows_of_output - tail, 0), CHUNK)
    for item in range(tl.program_id(0), (real_chunks + behind) * TILES, tl.num_programs(0)):
        chunk = item // TILES
        is_real = chunk < real_chunks
        of_chunk = chunks + tl.where(is_real, chunk, 0) * FIELDS
        first_row = tl.where(is_real, tl.load(of_chunk), tail + (chunk - real_chunks) * CHUNK)
        end = tl.where(is_real, tl.minimum(tl.load(of_chunk + 2), rows_of_output), rows_of_output)
        if (tl.load(of_chunk + 3) < 0) | (chunk >= real_chunks):
            rows = (first_row + tl.arange(0, CHUNK))[:, None]
            of_output = output + rows.to(tl.int64) * INNER + ((item % TILES) * TILE + tl.arange(0, TILE))[None, :]
            tl.store(of_output, tl.zeros([CHUNK, TILE], output.dtype.element_ty), mask=rows < end)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Launch parameters, chosen by a layer's shape, dtype and GPU alone: its bits do not depend on a step's size."""

    many: Walk
    # for ever more sequences
    few: tuple[Walk, ...] = ()
    relate_programs: int = 1056
    clearing_programs: int = 132


def tuning_for(shape: Shape, q: Any) -> Tuning:
    """Return the tuning of a layer of this shape with queries like these."""
    many, parts = Walk(2 * MULTIPROCESSORS, 4, stages=2, part=32), [16, 32]
    # as TF32 larger parts round otherwise, and for sm_100 Triton makes an empty kernel of the largest
    if splits(q.dtype) and not generations.is_newer_than_hopper(q):
        many, parts = Walk(MULTIPROCESSORS, 8, stages=2, part=128), [16, 32, 64]
    return Tuning(many, of_few_sequences((Walk(MULTIPROCESSORS, 4, stages=3, part=part) for part in parts), shape))


# of a tile of zeros
MOST_COLUMNS = 128


def splits(dtype: Any) -> bool:
    """Tell whether fp32 numbers are multiplied by such inputs in halves, and not as TF32."""
    return dtype is torch.bfloat16


def ready(device: int) -> Accepted | Rejected:
    return generations.is_one_of(device, generations.HOPPER, generations.BLACKWELL)


def can_keep_checkpoints() -> bool:
    return True


@dataclasses.dataclass
class Scratch:
    """Scratch from `relate` to `advance`; nothing in it outlives the call."""

    # of each head and row: its key with every query of its chunk; of fp32 numbers in halves the high ones, then the low
    near: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning | None = None) -> Scratch:
        """Allocate for an output of so many rows."""
        halves, kind = (2, dtype) if splits(dtype) else (1, torch.float32)
        return cls(torch.empty(halves, shape.heads, rows, tables.chunk, dtype=kind, device=tables.counts.device))


def extend(q: Any, k: Any, v: Any, *, tables: Tables, **others: Any) -> Any:
    """Run one layer, as the package's contract describes; `run` has the other parameters."""
    rows, heads, head = q.shape
    output = torch.empty(rows, heads * head, dtype=q.dtype, device=q.device)
    scratch = Scratch.for_rows(rows, tables, Shape(heads, head), q.dtype)
    run(q, k, v, output, scratch=scratch, tables=tables, **others)
    return output


def run(
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    *,
    decay: Any,
    scale: float,
    state: Any,
    tables: Tables,
    scratch: Scratch,
    tracking: bool = False,
    tuning: Tuning | None = None,
) -> None:
    """Launch the kernels into an output, contiguous, of [rows, heads * head]."""
    rows, heads, head = q.shape
    shape = Shape(heads, head)
    tuning = tuning or tuning_for(shape, q)
    if rows > tables.max_tokens:
        raise ValueError(f"{rows} rows, but the tables were made for {tables.max_tokens} tokens")
    split = splits(q.dtype)
    relate[(tuning.relate_programs,)](
        q,
        k,
        decay,
        scratch.near,
        tables.chunks,
        tables.counts,
        rows,
        tables.max_chunks,
        Q_ROW=q.stride(0),
        K_ROW=k.stride(0),
        HEADS=heads,
        HEAD=head,
        CHUNK=tables.chunk,
        FIELDS=CHUNK_FIELDS,
        SPLIT=split,
        num_warps=4,
        num_stages=1,
    )
    for walk, least_sequences, most_sequences in launches(tuning.few, tuning.many, shape, tables.max_sequences):
        advance[(walk.programs,)](
            q,
            k,
            v,
            scratch.near,
            decay,
            output,
            state,
            tables.sequences,
            tables.counts,
            state.stride(0),
            rows,
            scale,
            least_sequences,
            most_sequences,
            Q_ROW=q.stride(0),
            K_ROW=k.stride(0),
            V_ROW=v.stride(0),
            HEADS=heads,
            HEAD=head,
            PART=walk.part_of(shape),
            CHUNK=tables.chunk,
            FIELDS=SEQUENCE_FIELDS,
            STAGES=walk.stages,
            TRACK=tracking,
            SPLIT=split,
            num_warps=walk.warps,
            num_stages=walk.stages,
        )
    inner = heads * head
    clear[(tuning.clearing_programs,)](
        output,
        tables.chunks,
        tables.counts,
        rows,
        tables.max_chunks,
        INNER=inner,
        TILE=min(inner & -inner, MOST_COLUMNS),
        CHUNK=tables.chunk,
        FIELDS=CHUNK_FIELDS,
        num_warps=4,
        num_stages=1,
    )
