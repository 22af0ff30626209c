# SPDX-License-Identifier: Apache-2.0
"""Extend of Kimi's delta rule in two Triton kernels, with the same launches for every batch of a captured graph.

`prepare` is parallel over tokens: convolution, gates, norms, and the 64x64 matrices of each chunk. `advance` walks
along each sequence: state and output. Both are persistent and read their work from the tables on the device.

Per chunk, with G [tokens, keys] the running sum of the gates from the chunk's first token, S [values, keys] the state
before it, and . a sum over keys:

    A[i, j] = beta_i k_i.(exp(G_i - G_j) k_j), j < i    T = (I + A)^-1 diag(beta)
    P[i, j] = q_i.(exp(G_i - G_j) k_j), j <= i          r_i = v_i - S (exp(G_i) k_i)
    n = T r                                             output_i = S (exp(G_i) q_i) + sum_j P[i, j] n_j
    S after it = S diag(exp(G_last)) + sum_j n_j (exp(G_last - G_j) k_j)^T

A product of matrices needs exp(G_i - G_j) as one factor of i and one of j, and exp(-G_j) may be infinite. So the pairs
of tokens are taken by distance: those of the two halves of the chunk, then of the halves of each half, down to
neighbours. Of each such pair of halves, the last token r of the earlier one is the reference: exp(G_i - G_r) and
exp(G_r - G_j) are at most 1. Every token is in one half of each size, so a tile has one factor for both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.kda_extend import Shape
from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.convolution import (
    LOG2_E,
    chunk_inputs,
    convolved,
    power_of_two,
    turn_window,
)
from sglang_bcg_fixes.kernels.linear_extend.delta_rule import (
    BLOCK,
    NORM_EPSILON,
    SOFTPLUS_LINEAR,
    bounded,
    convolve_values,
    invert_blocks,
    merge,
)
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK_FIELDS, SEQUENCE_FIELDS, Tables
from sglang_bcg_fixes.model import Accepted, Rejected


@triton.jit
def _below_zero(exponent):
    """Take back what rounding may leave of a sum above a longer one."""
    return tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _forgetting(x, rate):
    """Compute gates, base 2: -rate softplus(x). Logarithms to base 2 are one instruction."""
    wide = x * LOG2_E
    return -rate * tl.where(x <= SOFTPLUS_LINEAR, tl.log2(1.0 + tl.exp2(wide)), wide)


@triton.jit
def _running_sums(gate):
    """Sum gates [token, key] from the first token on: a product, because a scan goes through all threads.

    Two halves in fp16 hold 22 bits of each gate.
    """
    token = tl.arange(0, gate.shape[0])
    is_past = (token[:, None] >= token[None, :]).to(tl.float16)
    high = gate.to(tl.float16)
    low = (gate - high.to(tl.float32)).to(tl.float16)
    return tl.dot(is_past, low, acc=tl.dot(is_past, high))


@triton.jit
def _normed(mixed, scale):
    """Scale queries or keys [row, key] to this length."""
    return mixed * (scale / tl.sqrt(tl.sum(mixed * mixed, 1) + NORM_EPSILON))[:, None]


@triton.jit
def _products_between_halves(q, k, sums, own_sums, half):
    """Compute products of keys, and of queries and keys, between each `half` tokens and the `half` before them."""
    token = tl.arange(0, k.shape[0])
    key = tl.arange(0, k.shape[1])
    reference = token // (2 * half) * (2 * half) + half - 1
    at_reference = tl.load(own_sums + reference[:, None] * k.shape[1] + key[None, :])
    is_later = token // half % 2 == 1
    factor = tl.exp2(_below_zero(tl.where(is_later[:, None], sums - at_reference, at_reference - sums)))
    # at most 1, so fp16 rounds them as finely as tf32 would
    near_k = (k * factor).to(tl.float16)
    near_q = (q * factor).to(tl.float16)
    between = (token[:, None] // (2 * half) == token[None, :] // (2 * half)) & (
        token[:, None] // half > token[None, :] // half
    )
    of_keys = tl.where(between, tl.dot(near_k, tl.trans(near_k)), 0.0)
    return of_keys, tl.where(between, tl.dot(near_q, tl.trans(near_k)), 0.0)


@triton.jit(do_not_specialize=["rows_of_output", "capacity", "max_chunks"])
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
    last_keys,
    inverses,
    scores,
    decays,
    workspace,
    windows,
    output,
    chunks,
    counts,
    a_row,
    b_row,
    conv_slot,
    conv_channel,
    conv_past,
    rows_of_output,
    capacity,
    max_chunks,
    scale,
    lower_bound,
    X_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOWER_BOUND: tl.constexpr,
    IS_SQUASHED: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    STRIP: tl.constexpr,
    FIELDS: tl.constexpr,
    WORKSPACE: tl.constexpr,
    WINDOW: tl.constexpr,
    TRACK: tl.constexpr,
):
    """Process work items: each chunk's matrices by head, its values by head, the tail of zeros."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    OUTPUT_ROW: tl.constexpr = HEADS * VALUES
    kind: tl.constexpr = output.dtype.element_ty
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    tail = tl.load(counts + 1)
    matrix_items = real_chunks * HEADS
    tail_chunks = tl.cdiv(tl.maximum(rows_of_output - tail, 0), CHUNK)
    items = matrix_items + (real_chunks + tail_chunks) * HEADS
    in_chunk = tl.arange(0, CHUNK)
    # of the block on the diagonal, in the order of blocks; elsewhere not used
    on_diagonal = in_chunk[:, None] // BLOCK == in_chunk[None, :] // BLOCK
    in_blocks = in_chunk[:, None] * BLOCK + in_chunk[None, :] % BLOCK
    own_below = workspace + tl.program_id(0).to(tl.int64) * WORKSPACE
    own_inverse = own_below + CHUNK * BLOCK
    own_sums = own_inverse + CHUNK * BLOCK
    own_window = windows + tl.program_id(0) * WINDOW
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        if item < matrix_items:
            chunk = item // HEADS
            of_chunk = chunks + chunk * FIELDS
            head = item % HEADS
            first_row = tl.load(of_chunk)
            start = tl.load(of_chunk + 1)
            end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
            slot = tl.load(of_chunk + 3).to(tl.int64)
            if slot >= 0:
                rows = first_row + in_chunk
                real = rows < end
                key = tl.arange(0, KEYS)
                of_queries = head * KEYS + key
                of_keys = HEADS * KEYS + of_queries
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
                gate = tl.load(
                    a + rows.to(tl.int64)[:, None] * a_row + of_queries[None, :], mask=real[:, None], other=0.0
                ).to(tl.float32)
                gate += tl.load(dt_bias + of_queries).to(tl.float32)[None, :]
                rate = tl.exp(tl.load(A_log + head).to(tl.float32))
                safe = lower_bound * tl.sigmoid(rate * gate) * LOG2_E
                gate = safe if HAS_LOWER_BOUND else _forgetting(gate, rate)
                in_sums = in_chunk[:, None] * KEYS + key[None, :]
                tl.store(own_sums + in_sums, _running_sums(tl.where(real[:, None], bounded(gate), 0.0)))
                # a reference's sums are another thread's; read again, so that registers hold them as they hold queries
                tl.debug_barrier()
                sums = tl.load(own_sums + in_sums)
                last = tl.load(own_sums + (CHUNK - 1) * KEYS + key)
                tl.store(decays + (chunk * HEADS + head) * KEYS + key, tl.exp2(last))
                gain = tl.load(b + rows.to(tl.int64) * b_row + head, mask=real, other=0.0).to(tl.float32)
                if not IS_SQUASHED:
                    gain = tl.where(real, tl.sigmoid(gain), 0.0)
                q = chunk_inputs(x, own_window, of_queries, start, end, first_row, X_ROW, WIDTH, 1, CHUNK)
                q = _normed(convolved(q, weights, bias, of_queries, WIDTH, 1, HAS_BIAS)[0], scale)
                k = chunk_inputs(x, own_window + WINDOW // 2, of_keys, start, end, first_row, X_ROW, WIDTH, 1, CHUNK)
                k = _normed(convolved(k, weights, bias, of_keys, WIDTH, 1, HAS_BIAS)[0], 1.0)
                decay = tl.exp2(sums)
                at = (head * capacity + rows).to(tl.int64)[:, None] * KEYS + key[None, :]
                tl.store(queries + at, (q * decay).to(kind), mask=real[:, None])
                # the reader subtracts what the state knows, and can only add a product
                tl.store(keys + at, (-k * decay).to(kind), mask=real[:, None])
                to_end = tl.exp2(_below_zero(last[None, :] - sums))
                tl.store(last_keys + at, (k * to_end).to(kind), mask=real[:, None])
                kk = tl.zeros([CHUNK, CHUNK], tl.float32)
                qk = tl.zeros([CHUNK, CHUNK], tl.float32)
                for level in range(LEVELS):
                    # a short sequence has no tokens that far apart
                    if (1 << level) < end - first_row:
                        nearer_k, nearer_q = _products_between_halves(q, k, sums, own_sums, 1 << level)
                        kk += nearer_k
                        qk += nearer_q
                is_same = in_chunk[:, None] == in_chunk[None, :]
                qk = tl.where(is_same, tl.sum(q * k, 1)[:, None], qk)
                of_head = (head * capacity + rows).to(tl.int64)[:, None] * CHUNK + in_chunk[None, :]
                tl.store(scores + of_head, qk.to(kind), mask=real[:, None])
                below = kk * gain[:, None]
                # only the part below a block's diagonal is ever read
                tl.store(own_below + in_blocks, below, mask=on_diagonal)
                tl.debug_barrier()
                invert_blocks(own_below, own_inverse, BLOCKS)
                tl.debug_barrier()
                inverse = tl.load(own_inverse + in_blocks, mask=on_diagonal, other=0.0)
                # a short sequence has only the first block
                if BLOCKS >= 2 and end - first_row > BLOCK:
                    inverse = merge(inverse, below.to(tl.float16), 16, CHUNK)
                    if BLOCKS >= 4:
                        inverse = merge(inverse, below.to(tl.float16), 32, CHUNK)
                inverse *= gain[None, :]
                tl.store(inverses + of_head, inverse.to(kind), mask=real[:, None])
                # the next item of this program overwrites it
                tl.debug_barrier()
        else:
            chunk = (item - matrix_items) // HEADS
            head = (item - matrix_items) % HEADS
            convolve_values(
                x, weights, bias, conv, output, own_window, chunks, chunk, head, 2 * HEADS * KEYS, conv_slot,
                conv_channel, conv_past, real_chunks, tail, rows_of_output, rows_of_output, X_ROW, OUTPUT_ROW, VALUES,
                WIDTH, HAS_BIAS, CHUNK, STRIP, FIELDS, TRACK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows_of_output", "capacity"])
def advance(
    queries,
    keys,
    last_keys,
    inverses,
    scores,
    decays,
    output,
    state,
    sequences,
    counts,
    state_slot,
    rows_of_output,
    capacity,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    TRACK: tl.constexpr,
):
    """Process work items: PART values of a head of a sequence, longest sequences first."""
    PARTS: tl.constexpr = VALUES // PART
    kind: tl.constexpr = output.dtype.element_ty
    items = tl.load(counts + 2) * (HEADS * PARTS)
    in_chunk = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        of_sequence = sequences + (item // (HEADS * PARTS)) * FIELDS
        start = tl.load(of_sequence)
        end = tl.minimum(tl.load(of_sequence + 1), rows_of_output)
        slot = tl.load(of_sequence + 2).to(tl.int64)
        first_chunk = tl.load(of_sequence + 5)
        head = (item // PARTS) % HEADS
        value = head * VALUES + (item % PARTS) * PART + tl.arange(0, PART)
        of_state = state + slot * state_slot + value[:, None] * KEYS + key[None, :]
        # a checkpoint splits the walk in two
        middle = start
        track_slot = slot
        if TRACK:
            middle += tl.maximum(tl.load(of_sequence + 3), 0)
            track_slot = tl.load(of_sequence + 4).to(tl.int64)
        S = tl.load(of_state, mask=start < end, other=0.0).to(tl.float32)
        for piece in range(2 if TRACK else 1):
            first = start
            last_row = end
            if TRACK:
                first = tl.where(piece == 0, start, middle)
                last_row = tl.where(piece == 0, tl.minimum(end, middle), end)
            for first_row in tl.range(first, last_row, CHUNK, num_stages=STAGES):
                rows = first_row + in_chunk
                # past the end repeat the last row, never a neighbour's; what it would teach is multiplied by zero
                taken = tl.minimum(rows, end - 1)
                of_head = (head * capacity + taken).to(tl.int64)[:, None]
                k = tl.load(keys + of_head * KEYS + key[None, :])
                q = tl.load(queries + of_head * KEYS + key[None, :])
                last_k = tl.load(last_keys + of_head * KEYS + key[None, :], mask=(rows < end)[:, None], other=0.0)
                T = tl.load(inverses + of_head * CHUNK + in_chunk[None, :])
                P = tl.load(scores + of_head * CHUNK + in_chunk[None, :])
                v = tl.load(output + taken.to(tl.int64)[:, None] * (HEADS * VALUES) + value[None, :])
                chunk = first_chunk + (first_row - start) // CHUNK
                whole = tl.load(decays + (chunk * HEADS + head) * KEYS + key)
                rounded = S.to(kind)
                n = tl.dot(tl.trans(v), tl.trans(T))
                known = tl.dot(rounded, tl.trans(k))
                found = tl.dot(rounded, tl.trans(q))
                n = tl.dot(known.to(kind), tl.trans(T), acc=n).to(kind)
                # no summand of the product: Triton 3.6 fails on one that goes round a loop, for sm_100
                S = tl.fma(S, tl.broadcast_to(whole[None, :], S.shape), tl.dot(n, last_k))
                found = tl.dot(n, tl.trans(P), acc=found)
                of_output = output + rows.to(tl.int64)[:, None] * (HEADS * VALUES) + value[None, :]
                tl.store(of_output, tl.trans(found).to(kind), mask=(rows < end)[:, None])
            if TRACK and (piece == 0) & (track_slot >= 0) & (start < end):
                tl.store(of_state + (track_slot - slot) * state_slot, S.to(state.dtype.element_ty))
        if start < end:
            tl.store(of_state, S.to(state.dtype.element_ty))


# with fewer, Triton 3.6's products of gates (_running_sums) read past shared memory where two warpgroups share their
# columns
KEYS_OF_TWO_WARPGROUPS = 128


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Launch parameters, chosen by times on an H200; no bit of a result depends on them."""

    prepare_programs: int = 264
    prepare_warps: int = 8
    strip: int = 8
    advance_programs: int = 264
    advance_warps: int = 4
    advance_stages: int = 3
    part: int = 64


def tuning_for(rows: int) -> Tuning:
    """Return the tuning of a graph that is captured for so many rows."""
    return Tuning()


@dataclasses.dataclass
class Scratch:
    """Scratch from `prepare` to `advance`; nothing in it outlives the call."""

    # exp(G) q, -exp(G) k and exp(G_last - G) k
    queries: Any
    keys: Any
    last_keys: Any
    inverses: Any
    scores: Any
    # of a chunk: exp(G_last)
    decays: Any
    # of each program of `prepare`: exchanged between its threads
    workspace: Any
    windows: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        """Allocate for outputs of up to so many rows."""

        def empty(*sizes: int, kind: Any = dtype) -> Any:
            return torch.empty(*sizes, dtype=kind, device=tables.counts.device)

        programs, chunk = tuning.prepare_programs, tables.chunk
        return cls(
            queries=empty(shape.heads, rows, shape.keys),
            keys=empty(shape.heads, rows, shape.keys),
            last_keys=empty(shape.heads, rows, shape.keys),
            inverses=empty(shape.heads, rows, chunk),
            scores=empty(shape.heads, rows, chunk),
            decays=empty(tables.chunks_of(rows), shape.heads, shape.keys, kind=torch.float32),
            # blocks, their inverses, and sums of gates
            workspace=empty(programs, chunk * (2 * BLOCK.value + shape.keys), kind=torch.float32),
            # of queries and keys, or of values
            windows=empty(programs, 2 * power_of_two(shape.width - 1) * max(shape.keys, shape.values)),
        )


def ready(device: int) -> Accepted | Rejected:
    return generations.is_one_of(device, generations.HOPPER, generations.BLACKWELL)


@dataclasses.dataclass(frozen=True)
class Call:
    """One layer's extend."""

    mixed_qkv: Any
    a: Any
    b: Any
    shape: Shape
    conv_weights: Any
    bias: Any
    A_log: Any
    dt_bias: Any
    is_squashed: bool
    conv: Any
    state: Any
    tables: Tables
    scratch: Scratch
    output: Any
    tracking: bool
    tuning: Tuning

    def __post_init__(self) -> None:
        rows, held = self.output.shape[0], self.scratch.scores.shape[1]
        if rows > self.tables.max_tokens:
            raise ValueError(f"an output of {rows} rows, but the tables were made for {self.tables.max_tokens} tokens")
        if held < rows:
            raise ValueError(f"the scratch is for {held} rows, too few for an output of {rows}")

    def prepare(self) -> None:
        scratch, tables, shape, tuning = self.scratch, self.tables, self.shape, self.tuning
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
            scratch.last_keys,
            scratch.inverses,
            scratch.scores,
            scratch.decays,
            scratch.workspace,
            scratch.windows,
            self.output,
            tables.chunks,
            tables.counts,
            self.a.stride(0),
            self.b.stride(0),
            *self.conv.stride(),
            self.output.shape[0],
            scratch.scores.shape[1],
            scratch.decays.shape[0],
            shape.keys**-0.5,
            0.0 if shape.lower_bound is None else shape.lower_bound,
            X_ROW=self.mixed_qkv.stride(0),
            HEADS=shape.heads,
            KEYS=shape.keys,
            VALUES=shape.values,
            WIDTH=shape.width,
            HAS_BIAS=self.bias is not None,
            HAS_LOWER_BOUND=shape.lower_bound is not None,
            IS_SQUASHED=self.is_squashed,
            CHUNK=tables.chunk,
            LEVELS=levels_of(tables.chunk),
            STRIP=tuning.strip,
            FIELDS=CHUNK_FIELDS,
            WORKSPACE=scratch.workspace.shape[1],
            WINDOW=scratch.windows.shape[1],
            TRACK=self.tracking,
            num_warps=tuning.prepare_warps if shape.keys >= KEYS_OF_TWO_WARPGROUPS else 4,
            num_stages=1,
        )

    def advance(self) -> None:
        scratch, tables, shape, tuning = self.scratch, self.tables, self.shape, self.tuning
        advance[(tuning.advance_programs,)](
            scratch.queries,
            scratch.keys,
            scratch.last_keys,
            scratch.inverses,
            scratch.scores,
            scratch.decays,
            self.output,
            self.state,
            tables.sequences,
            tables.counts,
            self.state.stride(0),
            self.output.shape[0],
            scratch.scores.shape[1],
            HEADS=shape.heads,
            KEYS=shape.keys,
            VALUES=shape.values,
            PART=min(tuning.part, shape.values),
            CHUNK=tables.chunk,
            FIELDS=SEQUENCE_FIELDS,
            STAGES=tuning.advance_stages,
            TRACK=self.tracking,
            num_warps=tuning.advance_warps,
            num_stages=tuning.advance_stages,
        )

    def launch(self) -> None:
        self.prepare()
        self.advance()


def levels_of(chunk: int) -> int:
    """Return how often a chunk can be halved."""
    return chunk.bit_length() - 1


def extend(mixed_qkv: Any, a: Any, b: Any, *, tracking: bool = False, tuning: Tuning = Tuning(), **others: Any) -> None:
    """Run the launches; Call lists the other parameters, the package the contract."""
    Call(mixed_qkv, a, b, tracking=tracking, tuning=tuning, **others).launch()
