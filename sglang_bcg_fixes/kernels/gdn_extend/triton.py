# SPDX-License-Identifier: Apache-2.0
"""Extend of the gated delta rule in two Triton kernels, with the same launches for every batch of a captured graph.

`prepare` is parallel over tokens: convolution, gates, norms, and the 64x64 matrices of each chunk. `advance` walks
along each sequence: state and output. Both are persistent and read their work from the tables on the device.

Per chunk, with G the running sum of the gates from the chunk's first token and S [values, keys] the state before it:

    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j, j < i      T = (I + A)^-1 diag(beta)
    P[i, j] = exp(G_i - G_j) q_i.k_j, j <= i            r_i = v_i - exp(G_i) S k_i
    n = T r                                             output_i = exp(G_i) S q_i + sum_j P[i, j] n_j
    S after it = exp(G_last) S + sum_j exp(G_last - G_j) n_j k_j^T

Every exponent is a difference that is never positive. `advance` keeps values as the rows of S, r and n: the accumulator
of one product is then the left operand of the next, and the chain never goes through shared memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from sglang_bcg_fixes.kernels.gdn_extend import Shape
from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.convolution import chunk_inputs, convolved, power_of_two, turn_window
from sglang_bcg_fixes.kernels.linear_extend.delta_rule import (
    BLOCK,
    NORM_EPSILON,
    bounded,
    convolve_values,
    forgetting,
    invert_blocks,
    merge,
)
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK_FIELDS, SEQUENCE_FIELDS, Tables
from sglang_bcg_fixes.model import Accepted, Rejected


@triton.jit
def _normed(mixed, scale, first_row, end, into, STRIP: tl.constexpr, CHUNK: tl.constexpr):
    """Normalise queries or keys to length `scale`; store them to `into` [row, channels], return one tile."""
    channels: tl.constexpr = mixed[0].shape[1]
    row = (first_row + tl.arange(0, CHUNK // STRIP) * STRIP)[:, None]
    of_row = into + row * channels + tl.arange(0, channels)[None, :]
    rounded = ()
    for number in tl.static_range(STRIP):
        length = tl.sqrt(tl.sum(mixed[number] * mixed[number], 1) + NORM_EPSILON)
        normed = (mixed[number] * (scale / length)[:, None]).to(into.dtype.element_ty)
        tl.store(of_row + number * channels, normed, mask=row < end - number)
        rounded += (normed,)  # type: ignore[assignment]
    return _interleaved(rounded, STRIP)


@triton.jit
def _interleaved(strips, STRIP: tl.constexpr):
    """Interleave the tuple into one tile: its n-th has rows n, n + STRIP and so on."""
    count: tl.constexpr = strips[0].shape[0]
    channels: tl.constexpr = strips[0].shape[1]
    if STRIP == 4:
        # [strip, channel, 2, 2], the last axis has the higher bit of the row
        joined = tl.join(tl.join(strips[0], strips[1]), tl.join(strips[2], strips[3]))
        ordered = tl.permute(joined, (0, 3, 2, 1))
    else:
        low = tl.join(tl.join(strips[0], strips[1]), tl.join(strips[2], strips[3]))
        high = tl.join(tl.join(strips[4], strips[5]), tl.join(strips[6], strips[7]))
        ordered = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    return ordered.reshape(count * STRIP, channels)


@triton.jit
def _gates(a, a_row, A_log, dt_bias, head, rows, real):
    """Compute a chunk's gates, base 2; 0 past its end."""
    x = tl.load(a + rows.to(tl.int64) * a_row + head, mask=real, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head).to(tl.float32)
    return tl.where(real, bounded(forgetting(x, tl.exp(tl.load(A_log + head).to(tl.float32)))), 0.0)


@triton.jit(do_not_specialize=["span", "first_token", "rows_of_output", "last_token", "capacity", "max_chunks"])
def prepare(
    x,
    a,
    b,
    weights,
    bias,
    A_log,
    dt_bias,
    conv,
    queries,
    keys,
    inverses,
    scores,
    decays,
    workspace,
    windows,
    output,
    chunks,
    counts,
    bounds,
    span,
    first_token,
    a_row,
    b_row,
    conv_slot,
    conv_channel,
    conv_past,
    rows_of_output,
    last_token,
    capacity,
    max_chunks,
    scale,
    X_ROW: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    FIELDS: tl.constexpr,
    WORKSPACE: tl.constexpr,
    WINDOW: tl.constexpr,
    TRACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process work items: each chunk's matrices by key head, its values by value head, the tail of zeros."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    OUTPUT_ROW: tl.constexpr = VALUE_HEADS * VALUES
    if OVERLAP:
        cuda.gdc_launch_dependents()
    first_chunk = tl.load(bounds + span)
    real_chunks = tl.minimum(tl.load(bounds + span + 1) - first_chunk, max_chunks)
    chunks += first_chunk * FIELDS
    # rows of this span past the last token
    tail = tl.maximum(tl.load(counts + 1), first_token)
    matrix_items = real_chunks * KEY_HEADS
    tail_chunks = tl.cdiv(tl.maximum(last_token - tail, 0), CHUNK)
    items = matrix_items + (real_chunks + tail_chunks) * VALUE_HEADS
    in_chunk = tl.arange(0, CHUNK)
    # of the block on the diagonal, in the order of blocks; elsewhere not used
    on_diagonal = in_chunk[:, None] // BLOCK == in_chunk[None, :] // BLOCK
    in_blocks = in_chunk[:, None] * BLOCK + in_chunk[None, :] % BLOCK
    own_below = workspace + tl.program_id(0) * WORKSPACE
    own_inverse = own_below + GROUP * CHUNK * BLOCK
    own_gates = own_inverse + GROUP * CHUNK * BLOCK
    own_gains = own_gates + GROUP * CHUNK
    own_window = windows + tl.program_id(0) * WINDOW
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < matrix_items:
            of_chunk = chunks + (item // KEY_HEADS) * FIELDS
            key_head = item % KEY_HEADS
            first_row = tl.load(of_chunk)
            start = tl.load(of_chunk + 1)
            end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
            slot = tl.load(of_chunk + 3).to(tl.int64)
            if slot >= 0:
                rows = first_row + in_chunk
                real = rows < end
                key = tl.arange(0, KEYS)
                of_queries = key_head * KEYS + key
                of_keys = (KEY_HEADS + key_head) * KEYS + key
                if first_row == start:
                    turn_window(
                        x, X_ROW, conv, conv_slot, conv_channel, conv_past, own_window, of_queries, of_chunk, start,
                        end, slot, WIDTH, TRACK,
                    )  # fmt: skip
                    turn_window(
                        x, X_ROW, conv, conv_slot, conv_channel, conv_past, own_window + WINDOW // 2, of_keys,
                        of_chunk, start, end, slot, WIDTH, TRACK,
                    )  # fmt: skip
                    tl.debug_barrier()
                q = chunk_inputs(x, own_window, of_queries, start, end, first_row, X_ROW, WIDTH, STRIP, CHUNK)
                for member in tl.static_range(GROUP):
                    head = key_head * GROUP + member
                    each = _gates(a, a_row, A_log, dt_bias, head, rows, real)
                    gain = tl.load(b + rows.to(tl.int64) * b_row + head, mask=real, other=0.0).to(tl.float32)
                    gate = tl.cumsum(each, 0)
                    last = tl.sum(each, 0)
                    tl.store(own_gates + member * CHUNK + in_chunk, gate)
                    tl.store(own_gains + member * CHUNK + in_chunk, tl.where(real, tl.sigmoid(gain), 0.0))
                    of_decays = decays + ((item // KEY_HEADS) * VALUE_HEADS + head) * (3 * CHUNK)
                    tl.store(of_decays + in_chunk, -tl.exp2(gate))
                    # rounding may leave the whole sum a little above a partial one
                    to_end = tl.exp2(tl.minimum(last - gate, 0.0, propagate_nan=tl.PropagateNan.ALL))
                    tl.store(of_decays + CHUNK + in_chunk, tl.where(real, to_end, 0.0))
                    tl.store(of_decays + 2 * CHUNK, tl.exp2(last))
                of_head = (key_head * capacity - first_token) * KEYS
                q = convolved(q, weights, bias, of_queries, WIDTH, STRIP, HAS_BIAS)
                # these loads are in flight while queries are normalised
                k = chunk_inputs(
                    x, own_window + WINDOW // 2, of_keys, start, end, first_row, X_ROW, WIDTH, STRIP, CHUNK
                )
                q = _normed(q, scale, first_row, end, queries + of_head, STRIP, CHUNK)
                k = convolved(k, weights, bias, of_keys, WIDTH, STRIP, HAS_BIAS)
                k = _normed(k, 1.0, first_row, end, keys + of_head, STRIP, CHUNK)
                # reload the gates instead of recomputing them for every layout
                tl.debug_barrier()
                kk = tl.dot(k, tl.trans(k))
                qk = tl.dot(q, tl.trans(k))
                not_earlier = in_chunk[:, None] >= in_chunk[None, :]
                below = ()
                for member in tl.static_range(GROUP):
                    gate = tl.load(own_gates + member * CHUNK + in_chunk)
                    gain = tl.load(own_gains + member * CHUNK + in_chunk)
                    decay = tl.exp2(tl.where(not_earlier, gate[:, None] - gate[None, :], -float("inf")))
                    score = (qk * decay).to(scores.dtype.element_ty)
                    decay *= kk * gain[:, None]
                    # only the part below a block's diagonal is ever read
                    tl.store(own_below + member * CHUNK * BLOCK + in_blocks, decay, mask=on_diagonal)
                    below += (decay.to(tl.float16),)  # type: ignore[assignment]
                    at = (key_head * GROUP + member) * capacity - first_token + rows
                    kept = at[:, None] * CHUNK + in_chunk[None, :]
                    tl.store(scores + kept, score, mask=real[:, None])
                tl.debug_barrier()
                invert_blocks(own_below, own_inverse, GROUP * BLOCKS)
                tl.debug_barrier()
                for member in tl.static_range(GROUP):
                    inverse = tl.load(own_inverse + member * CHUNK * BLOCK + in_blocks, mask=on_diagonal, other=0.0)
                    # a short sequence has only the first block
                    if BLOCKS >= 2 and end - first_row > BLOCK:
                        inverse = merge(inverse, below[member], 16, CHUNK)
                        if BLOCKS >= 4:
                            inverse = merge(inverse, below[member], 32, CHUNK)
                    inverse *= tl.load(own_gains + member * CHUNK + in_chunk)[None, :]
                    at = (key_head * GROUP + member) * capacity - first_token + rows
                    kept = at[:, None] * CHUNK + in_chunk[None, :]
                    tl.store(inverses + kept, inverse.to(inverses.dtype.element_ty), mask=real[:, None])
                # the next item of this program overwrites it
                tl.debug_barrier()
        else:
            chunk = (item - matrix_items) // VALUE_HEADS
            head = (item - matrix_items) % VALUE_HEADS
            convolve_values(
                x, weights, bias, conv, output, own_window, chunks, chunk, head, 2 * KEY_HEADS * KEYS, conv_slot,
                conv_channel, conv_past, real_chunks, tail, rows_of_output, last_token, X_ROW, OUTPUT_ROW, VALUES,
                WIDTH, HAS_BIAS, CHUNK, STRIP, FIELDS, TRACK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["span", "first_token", "rows_of_output", "last_token", "capacity"])
def advance(
    queries,
    keys,
    inverses,
    scores,
    decays,
    output,
    state,
    sequences,
    counts,
    bounds,
    span,
    first_token,
    state_slot,
    rows_of_output,
    last_token,
    capacity,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    TRACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process work items: PART values of a head of a sequence, longest sequences first."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = VALUES // PART
    items = tl.load(counts + 2) * (VALUE_HEADS * PARTS)
    in_chunk = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        of_sequence = sequences + (item // (VALUE_HEADS * PARTS)) * FIELDS
        start = tl.load(of_sequence)
        end = tl.minimum(tl.load(of_sequence + 1), rows_of_output)
        slot = tl.load(of_sequence + 2).to(tl.int64)
        head = (item // PARTS) % VALUE_HEADS
        value = (item % PARTS) * PART + tl.arange(0, PART)
        of_state = state + slot * state_slot + (head * VALUES + value)[:, None] * KEYS + key[None, :]
        # a span may begin and end within the sequence, but not within a chunk
        begin = start + tl.cdiv(tl.maximum(first_token - start, 0), CHUNK) * CHUNK
        stop = tl.minimum(start + tl.cdiv(tl.maximum(last_token - start, 0), CHUNK) * CHUNK, end)
        # a checkpoint splits the walk in two
        middle = start
        track_slot = slot
        if TRACK:
            middle += tl.maximum(tl.load(of_sequence + 3), 0)
            track_slot = tl.load(of_sequence + 4).to(tl.int64)
        is_here = begin < stop
        S = tl.load(of_state, mask=is_here, other=0.0).to(tl.float32)
        first_chunk = tl.load(of_sequence + 5) - tl.load(bounds + span)
        if OVERLAP:
            # tables and states were written before `prepare`
            cuda.gdc_wait()
        for piece in range(2 if TRACK else 1):
            first = begin
            last_row = stop
            if TRACK:
                first = tl.where(piece == 0, begin, tl.maximum(begin, middle))
                last_row = tl.where(piece == 0, tl.minimum(stop, middle), stop)
            # the previous chunk's output is stored while the next chunk is computed
            known_before = tl.zeros([PART, CHUNK], tl.float32)
            new_before = tl.zeros([PART, CHUNK], tl.float32)
            for first_row in tl.range(first, last_row, CHUNK, num_stages=STAGES):
                rows = first_row + in_chunk
                # past the end repeat the last row: never a neighbour's, and the decays multiply it by zero
                taken = tl.minimum(rows, end - 1)
                at = ((head // GROUP) * capacity - first_token + taken)[:, None] * KEYS + key[None, :]
                k = tl.load(keys + at)
                q = tl.load(queries + at)
                at = (head * capacity - first_token + taken)[:, None] * CHUNK + in_chunk[None, :]
                T = tl.load(inverses + at)
                P = tl.load(scores + at)
                v = tl.load(output + (taken.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUES + value[None, :])
                chunk = first_chunk + (first_row - start) // CHUNK
                of_decays = decays + (chunk * VALUE_HEADS + head) * (3 * CHUNK)
                minus_from_start = tl.load(of_decays + in_chunk)
                to_end = tl.load(of_decays + CHUNK + in_chunk)
                whole = tl.load(of_decays + 2 * CHUNK)
                # in a sequence's first chunk these are stale: they multiply zeros and are not stored
                of_decays -= tl.where(first_row > first, VALUE_HEADS * (3 * CHUNK), 0)
                minus_before = tl.load(of_decays + in_chunk)
                # the values are an operand, not a summand, so they never pass through registers
                n = tl.dot(tl.trans(v), tl.trans(T))
                o = (new_before - known_before * minus_before[None, :]).to(output.dtype.element_ty)
                rounded = S.to(keys.dtype.element_ty)
                known = tl.dot(rounded, tl.trans(k)) * minus_from_start[None, :]
                known_before = tl.dot(rounded, tl.trans(q))
                before = rows - CHUNK
                of_output = output + (before.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUES + value[None, :]
                tl.store(of_output, tl.trans(o), mask=(before >= first)[:, None])
                n = tl.dot(known.to(keys.dtype.element_ty), tl.trans(T), acc=n)
                S = tl.dot((n * to_end[None, :]).to(keys.dtype.element_ty), k, acc=S * whole)
                new_before = tl.dot(n.to(keys.dtype.element_ty), tl.trans(P))
            if last_row > first:
                chunk = first_chunk + (last_row - start - 1) // CHUNK
                minus_before = tl.load(decays + (chunk * VALUE_HEADS + head) * (3 * CHUNK) + in_chunk)
                o = (new_before - known_before * minus_before[None, :]).to(output.dtype.element_ty)
                before = first + (last_row - first - 1) // CHUNK * CHUNK + in_chunk
                of_output = output + (before.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUES + value[None, :]
                tl.store(of_output, tl.trans(o), mask=(before < end)[:, None])
            if TRACK and (piece == 0) & (track_slot >= 0) & is_here & (begin <= middle) & (middle <= stop):
                tl.store(of_state + (track_slot - slot) * state_slot, S.to(state.dtype.element_ty))
        tl.store(of_state, S.to(state.dtype.element_ty), mask=is_here)
    if OVERLAP:
        # even an idle program must not end before `prepare`: the next kernel waits for this one only
        cuda.gdc_wait()


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Launch parameters; results have the same bits with any of them, as benchmarks/gdn_tuning.py checks."""

    prepare_programs: int = 396
    prepare_warps: int = 4
    prepare_registers: int | None = 168
    strip: int = 8
    advance_programs: int = 132
    advance_warps: int = 4
    advance_stages: int = 3
    part: int = 64
    overlap: bool = False


# graphs of at most so many rows: few chunks, perhaps of many sequences, so there is nothing to prefetch
FEW_ROWS, FOR_FEW_ROWS = 1024, {"prepare_registers": None, "advance_stages": 1, "advance_programs": 264}


def tuning_for(rows: int) -> Tuning:
    """Return the tuning of a graph that is captured for so many rows."""
    return dataclasses.replace(Tuning(), **FOR_FEW_ROWS) if rows <= FEW_ROWS else Tuning()  # type: ignore[arg-type]


@dataclasses.dataclass
class Scratch:
    """Scratch from `prepare` to `advance`; nothing in it outlives the call."""

    queries: Any
    keys: Any
    inverses: Any
    scores: Any
    # of a chunk's tokens: -exp(G), exp(G_last - G), exp(G_last)
    decays: Any
    # of each program of `prepare`: exchanged between its threads
    workspace: Any
    windows: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        """Allocate for outputs of up to so many rows; it holds one span of them."""
        # a span's last chunk may reach into the next one
        rows = min(rows, tables.span + tables.chunk)

        def empty(*sizes: int, kind: Any = dtype) -> Any:
            return torch.empty(*sizes, dtype=kind, device=tables.counts.device)

        programs, group, chunk = tuning.prepare_programs, shape.value_heads // shape.key_heads, tables.chunk
        of_keys, of_values = (shape.key_heads, rows), (shape.value_heads, rows)
        return cls(
            queries=empty(*of_keys, shape.keys),
            keys=empty(*of_keys, shape.keys),
            inverses=empty(*of_values, chunk),
            scores=empty(*of_values, chunk),
            decays=empty(tables.chunks_of(rows), shape.value_heads, 3 * chunk, kind=torch.float32),
            # blocks, their inverses, gates and gains
            workspace=empty(programs, group * chunk * 2 * (BLOCK.value + 1), kind=torch.float32),
            # of queries and keys, or of values
            windows=empty(programs, 2 * power_of_two(shape.width - 1) * max(shape.keys, shape.values)),
        )


def ready(device: int) -> Accepted | Rejected:
    # Triton 3.6 does not compile `advance` for sm_100
    return generations.is_one_of(device, generations.HOPPER)


def registers(limit: int | None) -> dict[str, int]:
    """Return the compiler's option, which does not accept None."""
    return {} if limit is None else {"maxnreg": limit}


@dataclasses.dataclass(frozen=True)
class Call:
    """One layer's extend. Spans must be launched in order, each prepared before it is advanced."""

    mixed_qkv: Any
    a: Any
    b: Any
    shape: Shape
    conv_weights: Any
    bias: Any
    A_log: Any
    dt_bias: Any
    conv: Any
    state: Any
    tables: Tables
    scratch: Scratch
    output: Any
    tracking: bool
    tuning: Tuning

    def __post_init__(self) -> None:
        rows, held, span = self.output.shape[0], self.scratch.scores.shape[1], self.tables.span
        if rows > self.tables.max_tokens:
            raise ValueError(f"an output of {rows} rows, but the tables were made for {self.tables.max_tokens} tokens")
        if held < min(rows, span + self.tables.chunk):
            raise ValueError(f"the scratch is for {held} rows, too few for an output of {rows} in spans of {span}")

    @property
    def spans(self) -> int:
        return len(range(0, self.output.shape[0], self.tables.span))

    def tokens(self, span: int) -> tuple[int, int]:
        first = span * self.tables.span
        return first, min(first + self.tables.span, self.output.shape[0])

    def prepare(self, span: int) -> None:
        scratch, tables, shape, tuning = self.scratch, self.tables, self.shape, self.tuning
        first_token, last_token = self.tokens(span)
        prepare[(tuning.prepare_programs,)](
            self.mixed_qkv,
            self.a,
            self.b,
            self.conv_weights,
            self.bias,
            self.A_log,
            self.dt_bias,
            self.conv,
            scratch.queries,
            scratch.keys,
            scratch.inverses,
            scratch.scores,
            scratch.decays,
            scratch.workspace,
            scratch.windows,
            self.output,
            tables.chunks,
            tables.counts,
            tables.bounds,
            span,
            first_token,
            self.a.stride(0),
            self.b.stride(0),
            *self.conv.stride(),
            self.output.shape[0],
            last_token,
            scratch.scores.shape[1],
            scratch.decays.shape[0],
            shape.keys**-0.5,
            X_ROW=self.mixed_qkv.stride(0),
            KEY_HEADS=shape.key_heads,
            VALUE_HEADS=shape.value_heads,
            KEYS=shape.keys,
            VALUES=shape.values,
            WIDTH=shape.width,
            HAS_BIAS=self.bias is not None,
            CHUNK=tables.chunk,
            STRIP=tuning.strip,
            FIELDS=CHUNK_FIELDS,
            WORKSPACE=scratch.workspace.shape[1],
            WINDOW=scratch.windows.shape[1],
            TRACK=self.tracking,
            OVERLAP=tuning.overlap,
            num_warps=tuning.prepare_warps,
            num_stages=1,
            **registers(tuning.prepare_registers),
        )

    def advance(self, span: int) -> None:
        scratch, tables, shape, tuning = self.scratch, self.tables, self.shape, self.tuning
        first_token, last_token = self.tokens(span)
        advance[(tuning.advance_programs,)](
            scratch.queries,
            scratch.keys,
            scratch.inverses,
            scratch.scores,
            scratch.decays,
            self.output,
            self.state,
            tables.sequences,
            tables.counts,
            tables.bounds,
            span,
            first_token,
            self.state.stride(0),
            self.output.shape[0],
            last_token,
            scratch.scores.shape[1],
            KEY_HEADS=shape.key_heads,
            VALUE_HEADS=shape.value_heads,
            KEYS=shape.keys,
            VALUES=shape.values,
            PART=min(tuning.part, shape.values),
            CHUNK=tables.chunk,
            FIELDS=SEQUENCE_FIELDS,
            STAGES=tuning.advance_stages,
            TRACK=self.tracking,
            OVERLAP=tuning.overlap,
            num_warps=tuning.advance_warps,
            num_stages=tuning.advance_stages,
            **({"launch_pdl": True} if tuning.overlap else {}),
        )

    def launch(self) -> None:
        for span in range(self.spans):
            self.prepare(span)
            self.advance(span)


def extend(mixed_qkv: Any, a: Any, b: Any, *, tracking: bool = False, tuning: Tuning = Tuning(), **others: Any) -> None:
    """Run two launches per span of tokens; Call lists the other parameters, the package the contract."""
    Call(mixed_qkv, a, b, tracking=tracking, tuning=tuning, **others).launch()
