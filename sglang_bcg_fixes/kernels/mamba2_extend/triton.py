# SPDX-License-Identifier: Apache-2.0
"""Extend of Mamba2 in two or three Triton kernels, with the same launches for every batch of a captured graph.

`prepare` is parallel over tokens: convolution, step sizes, and their running sums in each chunk. `relate` is parallel
over chunks, for layers whose states are so large that B_j.C_i is worth computing once for all heads of a group.
`advance` walks along each sequence: state and output. They are persistent and read their work from the tables on the
device. A chunk begins where its sequence does, so nothing depends on neighbours.

Per chunk, with G the running sum of d A from the chunk's first token and S [head, states] the state before it:

    output_i = exp(G_i) S C_i + sum_j P[i, j] x_j + D x_i      P[i, j] = exp(G_i - G_j) d_j B_j.C_i, j <= i
    S after it = exp(G_last) S + sum_j (exp(G_last - G_j) d_j x_j) B_j^T

Every exponent is a difference that is never positive. `advance` keeps x as the rows of S and of the output: the state
is then the left operand of its product, and never goes through shared memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.convolution import (
    LOG2_E,
    chunk_inputs,
    convolved,
    power_of_two,
    turn_window,
)
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK_FIELDS, SEQUENCE_FIELDS, Tables
from sglang_bcg_fixes.kernels.mamba2_extend import Shape
from sglang_bcg_fixes.kernels.mamba2_extend.walks import MULTIPROCESSORS, Walk, launches, of_few_sequences, walked
from sglang_bcg_fixes.model import Accepted, Rejected

# 2^-160 is zero in fp32, and fp32 still resolves the sum of 64 such gates
LEAST_GATE = tl.constexpr(-160.0)
# above, softplus is the identity, as in SGLang
SOFTPLUS_LINEAR = tl.constexpr(20.0)


@triton.jit
def _softplus(x):
    """Compute log(1 + exp(x)), also where 1 + exp(x) is 1 in fp32."""
    small = tl.exp(tl.minimum(x, SOFTPLUS_LINEAR, propagate_nan=tl.PropagateNan.ALL))
    sum = 1.0 + small
    # the quotient takes back what the sum was rounded by
    exact = tl.where(sum == 1.0, small, tl.log(sum) * (small / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > SOFTPLUS_LINEAR, x, exact)


@triton.jit(do_not_specialize=["rows_of_output", "capacity", "max_chunks", "least_step", "most_step"])
def prepare(
    x,
    dt,
    weights,
    bias,
    A,
    dt_bias,
    conv,
    mixed,
    gates,
    windows,
    output,
    chunks,
    counts,
    dt_row,
    conv_slot,
    conv_channel,
    conv_past,
    rows_of_output,
    capacity,
    max_chunks,
    least_step,
    most_step,
    X_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    TILE: tl.constexpr,
    SIDE: tl.constexpr,
    FIELDS: tl.constexpr,
    TRACK: tl.constexpr,
):
    """Process work items: each chunk's gates by SIDE heads, its channels by TILE, the tail of zeros."""
    TILES: tl.constexpr = CHANNELS // TILE
    TILES_OF_X: tl.constexpr = INNER // TILE
    SIDES: tl.constexpr = (HEADS + SIDE - 1) // SIDE
    WINDOW: tl.constexpr = power_of_two(WIDTH - 1) * TILE
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    tail = tl.load(counts + 1)
    gate_items = real_chunks * SIDES
    channel_items = real_chunks * TILES
    tail_items = tl.cdiv(tl.maximum(rows_of_output - tail, 0), CHUNK) * TILES_OF_X
    in_chunk = tl.arange(0, CHUNK)
    own_window = windows + tl.program_id(0) * WINDOW
    for item in range(tl.program_id(0), gate_items + channel_items + tail_items, tl.num_programs(0)):
        if item < gate_items:
            of_chunk = chunks + (item // SIDES) * FIELDS
            rows = tl.load(of_chunk) + in_chunk
            end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
            if tl.load(of_chunk + 3) >= 0:
                head = (item % SIDES) * SIDE + tl.arange(0, SIDE)
                is_head = (head < HEADS)[None, :]
                real = (rows < end)[:, None]
                step = tl.load(dt + rows.to(tl.int64)[:, None] * dt_row + head[None, :], mask=real & is_head, other=0.0)
                step = step.to(tl.float32) + tl.load(dt_bias + head, mask=head < HEADS, other=0.0).to(tl.float32)
                step = tl.maximum(_softplus(step), least_step, propagate_nan=tl.PropagateNan.ALL)
                step = tl.where(real, tl.minimum(step, most_step, propagate_nan=tl.PropagateNan.ALL), 0.0)
                gate = step * (tl.load(A + head, mask=head < HEADS, other=0.0).to(tl.float32) * LOG2_E)[None, :]
                gate = tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)
                of_gates = gates + ((item // SIDES) * HEADS + head)[None, :] * (2 * CHUNK) + in_chunk[:, None]
                tl.store(of_gates, tl.cumsum(gate, 0), mask=is_head)
                tl.store(of_gates + CHUNK, step, mask=is_head)
        else:
            if item < gate_items + channel_items:
                chunk = (item - gate_items) // TILES
                tile = (item - gate_items) % TILES
                of_chunk = chunks + chunk * FIELDS
                first_row = tl.load(of_chunk)
                start = tl.load(of_chunk + 1)
                end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
                slot = tl.load(of_chunk + 3).to(tl.int64)
            else:
                chunk = (item - gate_items - channel_items) // TILES_OF_X
                tile = (item - gate_items - channel_items) % TILES_OF_X
                of_chunk = chunks
                first_row = tail + chunk * CHUNK
                start = first_row
                end = rows_of_output
                slot = tl.full([], -1, tl.int64)
            channels = tile * TILE + tl.arange(0, TILE)
            row = (first_row + tl.arange(0, CHUNK // STRIP) * STRIP)[:, None]
            # x is stored where the output will be: the reader overwrites it
            into = output + row.to(tl.int64) * INNER + channels[None, :]
            stride = tl.where(tile < TILES_OF_X, INNER, STATES)
            if tile >= TILES_OF_X:
                past_x = tile * TILE - INNER
                block = past_x // STATES
                into = mixed + (block * capacity + row).to(tl.int64) * STATES
                into += (past_x % STATES + tl.arange(0, TILE))[None, :]
            if slot >= 0:
                if first_row == start:
                    turn_window(
                        x, X_ROW, conv, conv_slot, conv_channel, conv_past, own_window, channels, of_chunk, start, end,
                        slot, WIDTH, TRACK,
                    )  # fmt: skip
                    tl.debug_barrier()
                taken = chunk_inputs(x, own_window, channels, start, end, first_row, X_ROW, WIDTH, STRIP, CHUNK)
                taken = convolved(taken, weights, bias, channels, WIDTH, STRIP, HAS_BIAS)
                for number in tl.static_range(STRIP):
                    value = taken[number].to(output.dtype.element_ty)
                    tl.store(into + number * stride, value, mask=row < end - number)
                # the next item reuses the window
                tl.debug_barrier()
            elif tile < TILES_OF_X:
                nothing = tl.zeros([CHUNK // STRIP, TILE], output.dtype.element_ty)
                for number in tl.static_range(STRIP):
                    tl.store(into + number * stride, nothing, mask=row < end - number)


@triton.jit(do_not_specialize=["rows_of_output", "capacity", "max_chunks"])
def relate(
    mixed,
    near,
    chunks,
    counts,
    rows_of_output,
    capacity,
    max_chunks,
    GROUPS: tl.constexpr,
    STATES: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Process work items: B_j.C_i of a group in a chunk."""
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    in_chunk = tl.arange(0, CHUNK)
    number = tl.arange(0, STATES)
    for item in range(tl.program_id(0), real_chunks * GROUPS, tl.num_programs(0)):
        group = item % GROUPS
        of_chunk = chunks + (item // GROUPS) * FIELDS
        rows = tl.load(of_chunk) + in_chunk
        end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
        if tl.load(of_chunk + 3) >= 0:
            is_real = (rows < end)[:, None]
            row = (group * capacity + rows).to(tl.int64)[:, None]
            of_b = mixed + row * STATES + number[None, :]
            b = tl.load(of_b, mask=is_real, other=0.0)
            c = tl.load(of_b + capacity.to(tl.int64) * (GROUPS * STATES), mask=is_real, other=0.0)
            # [from, to]
            tl.store(near + row * CHUNK + in_chunk[None, :], tl.dot(b, tl.trans(c)), mask=is_real)


@triton.jit(do_not_specialize=["rows_of_output", "capacity", "least_sequences", "most_sequences"])
def advance(
    mixed,
    near,
    gates,
    D,
    output,
    state,
    sequences,
    counts,
    state_slot,
    rows_of_output,
    capacity,
    least_sequences,
    most_sequences,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    STATES: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    STAGES: tl.constexpr,
    TRACK: tl.constexpr,
    RELATED: tl.constexpr,
    ADD_BEHIND: tl.constexpr,
):
    """Process work items: PART rows of a head of a sequence, longest sequences first.

    Do nothing unless the step has from least_sequences to most_sequences.
    """
    PARTS: tl.constexpr = HEAD // PART
    OF_GROUP: tl.constexpr = HEADS // GROUPS
    kind: tl.constexpr = output.dtype.element_ty
    items = walked(counts, least_sequences, most_sequences) * (HEADS * PARTS)
    in_chunk = tl.arange(0, CHUNK)
    number = tl.arange(0, STATES)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        of_sequence = sequences + (item // (HEADS * PARTS)) * FIELDS
        start = tl.load(of_sequence)
        end = tl.minimum(tl.load(of_sequence + 1), rows_of_output)
        slot = tl.load(of_sequence + 2).to(tl.int64)
        first_chunk = tl.load(of_sequence + 5)
        has_prefix = tl.load(of_sequence + 6) != 0
        head = (item // PARTS) % HEADS
        group = head // OF_GROUP
        column = head * HEAD + (item % PARTS) * PART + tl.arange(0, PART)
        of_state = state + slot * state_slot + column[:, None] * STATES + number[None, :]
        # a checkpoint splits the walk in two
        middle = start
        track_slot = slot
        if TRACK:
            middle += tl.maximum(tl.load(of_sequence + 3), 0)
            track_slot = tl.load(of_sequence + 4).to(tl.int64)
        through = tl.load(D + head).to(tl.float32)
        S = tl.load(of_state, mask=has_prefix & (start < end), other=0.0).to(tl.float32)
        for piece in range(2 if TRACK else 1):
            first = start
            last_row = end
            if TRACK:
                first = tl.where(piece == 0, start, middle)
                last_row = tl.where(piece == 0, tl.minimum(end, middle), end)
            for first_row in tl.range(first, last_row, CHUNK, num_stages=STAGES):
                rows = first_row + in_chunk
                # past the end repeat the last row: never a neighbour's, and its steps of zero multiply it
                taken = tl.minimum(rows, end - 1)
                at = (group * capacity + taken).to(tl.int64)[:, None] * STATES + number[None, :]
                b = tl.load(mixed + at)
                c = tl.load(mixed + at + capacity.to(tl.int64) * (GROUPS * STATES))
                x = tl.trans(tl.load(output + taken.to(tl.int64)[:, None] * (HEADS * HEAD) + column[None, :]))
                chunk = first_chunk + (first_row - start) // CHUNK
                of_gates = gates + (chunk * HEADS + head) * (2 * CHUNK)
                gate = tl.load(of_gates + in_chunk)
                last = tl.load(of_gates + CHUNK - 1)
                step = tl.load(of_gates + CHUNK + in_chunk)
                wide = x.to(tl.float32)
                # rounding may leave the whole sum a little above a partial one
                to_end = tl.exp2(tl.minimum(last - gate, 0.0, propagate_nan=tl.PropagateNan.ALL)) * step
                # early: it goes through shared memory, and meanwhile products run
                learned = (wide * to_end[None, :]).to(kind)
                # [from, to]
                is_past = in_chunk[:, None] <= in_chunk[None, :]
                decay = tl.exp2(tl.where(is_past, gate[None, :] - gate[:, None], -float("inf")))
                if RELATED:
                    of_near = near + (group * capacity + taken).to(tl.int64)[:, None] * CHUNK + in_chunk[None, :]
                    products = tl.load(of_near)
                else:
                    products = tl.dot(b, tl.trans(c))
                weights = (products * (decay * step[:, None])).to(kind)
                found = tl.dot(S.to(kind), tl.trans(c)) * tl.exp2(gate)[None, :]
                found = tl.dot(x, weights, acc=found)
                found += wide * through
                if ADD_BEHIND:
                    S = tl.fma(S, tl.broadcast_to(tl.exp2(last), S.shape), tl.dot(learned, b))
                else:
                    S = tl.dot(learned, b, acc=S * tl.exp2(last))
                of_output = output + rows.to(tl.int64)[:, None] * (HEADS * HEAD) + column[None, :]
                tl.store(of_output, tl.trans(found).to(kind), mask=(rows < end)[:, None])
            if TRACK and (piece == 0) & (track_slot >= 0) & (start < end):
                tl.store(of_state + (track_slot - slot) * state_slot, S.to(state.dtype.element_ty))
        if start < end:
            tl.store(of_state, S.to(state.dtype.element_ty))


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Launch parameters, chosen by a layer's shape alone: its bits do not depend on a step's size."""

    many: Walk
    # for ever more sequences
    few: tuple[Walk, ...] = ()
    relates: bool = False
    relate_programs: int = 528
    prepare_programs: int = 2112
    prepare_warps: int = 4
    strip: int = 16
    side: int = 8
    tile: int = 64


# more of a state of many sequences than this per thread, and its registers go to memory
STATES_OF_FOUR_WARPS = 128
# so many have enough channels for larger items of `prepare`
MANY_HEADS = 64


def tuning_for(shape: Shape) -> Tuning:
    """Return the tuning of a layer of this shape."""
    is_large = shape.states > STATES_OF_FOUR_WARPS
    many = Walk(2 * MULTIPROCESSORS, 8 if is_large else 4, stages=2, part=64)
    # three stages do not fit with more states and parts of 64
    parts = (16, 32) if is_large else (16, 32, 64)
    few = of_few_sequences((Walk(MULTIPROCESSORS, 4, stages=3, part=part) for part in parts), shape)
    sizes = {} if shape.heads < MANY_HEADS else {"side": 16, "tile": 128}
    return Tuning(many, few, relates=is_large, **sizes)


def tile_of(shape: Shape, tuning: Tuning) -> int:
    """Return the channels of a tile: no tile has some of x and some of the rest, or is in two blocks."""
    return min(tuning.tile, math.gcd(shape.inner, shape.states))


@dataclasses.dataclass
class Scratch:
    """Scratch from `prepare` to `advance`; nothing in it outlives the call."""

    # B of every group, then C of every group, convolved
    mixed: Any
    # of each group and token, if it is related: B.C with every token of its chunk
    near: Any
    # of a chunk's tokens, by head: G, then d
    gates: Any
    # of each program of `prepare`: exchanged between its threads
    windows: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        """Allocate for outputs of up to so many rows."""

        def empty(*sizes: int, kind: Any = dtype) -> Any:
            return torch.empty(*sizes, dtype=kind, device=tables.counts.device)

        return cls(
            mixed=empty(2 * shape.groups, rows, shape.states),
            near=empty(shape.groups, rows if tuning.relates else 0, tables.chunk, kind=torch.float32),
            gates=empty(tables.chunks_of(rows), shape.heads, 2 * tables.chunk, kind=torch.float32),
            windows=empty(tuning.prepare_programs, power_of_two(shape.width - 1) * tile_of(shape, tuning)),
        )


def ready(device: int) -> Accepted | Rejected:
    return generations.is_one_of(device, generations.HOPPER, generations.BLACKWELL)


@dataclasses.dataclass(frozen=True)
class Call:
    """One layer's extend."""

    inputs: Any
    dt: Any
    shape: Shape
    conv_weights: Any
    bias: Any
    A: Any
    D: Any
    dt_bias: Any
    conv: Any
    state: Any
    tables: Tables
    scratch: Scratch
    output: Any
    tracking: bool
    tuning: Tuning

    def __post_init__(self) -> None:
        rows, held = self.output.shape[0], self.scratch.mixed.shape[1]
        if rows > self.tables.max_tokens:
            raise ValueError(f"an output of {rows} rows, but the tables were made for {self.tables.max_tokens} tokens")
        if held < rows:
            raise ValueError(f"the scratch is for {held} rows, too few for an output of {rows}")

    def prepare(self) -> None:
        scratch, tables, shape, tuning = self.scratch, self.tables, self.shape, self.tuning
        prepare[(tuning.prepare_programs,)](
            self.inputs,
            self.dt,
            self.conv_weights,
            self.bias,
            self.A,
            self.dt_bias,
            self.conv,
            scratch.mixed,
            scratch.gates,
            scratch.windows,
            self.output,
            tables.chunks,
            tables.counts,
            self.dt.stride(0),
            *self.conv.stride(),
            self.output.shape[0],
            scratch.mixed.shape[1],
            scratch.gates.shape[0],
            shape.least_step,
            shape.most_step,
            X_ROW=self.inputs.stride(0),
            HEADS=shape.heads,
            INNER=shape.inner,
            CHANNELS=shape.channels,
            STATES=shape.states,
            WIDTH=shape.width,
            HAS_BIAS=self.bias is not None,
            CHUNK=tables.chunk,
            STRIP=tuning.strip,
            TILE=tile_of(shape, tuning),
            SIDE=tuning.side,
            FIELDS=CHUNK_FIELDS,
            TRACK=self.tracking,
            num_warps=tuning.prepare_warps,
            num_stages=1,
        )

    def relate(self) -> None:
        scratch, tables, shape = self.scratch, self.tables, self.shape
        relate[(self.tuning.relate_programs,)](
            scratch.mixed,
            scratch.near,
            tables.chunks,
            tables.counts,
            self.output.shape[0],
            scratch.mixed.shape[1],
            scratch.gates.shape[0],
            GROUPS=shape.groups,
            STATES=shape.states,
            CHUNK=tables.chunk,
            FIELDS=CHUNK_FIELDS,
            num_warps=4,
            num_stages=1,
        )

    def advance(self) -> None:
        for launch in launches(self.tuning.few, self.tuning.many, self.shape, self.tables.max_sequences):
            self.walk(*launch)

    def walk(self, walk: Walk, least_sequences: int, most_sequences: int) -> None:
        scratch, tables, shape = self.scratch, self.tables, self.shape
        advance[(walk.programs,)](
            scratch.mixed,
            scratch.near,
            scratch.gates,
            self.D,
            self.output,
            self.state,
            tables.sequences,
            tables.counts,
            self.state.stride(0),
            self.output.shape[0],
            scratch.mixed.shape[1],
            least_sequences,
            most_sequences,
            HEADS=shape.heads,
            GROUPS=shape.groups,
            HEAD=shape.head,
            STATES=shape.states,
            PART=walk.part_of(shape),
            CHUNK=tables.chunk,
            FIELDS=SEQUENCE_FIELDS,
            STAGES=walk.stages,
            TRACK=self.tracking,
            RELATED=self.tuning.relates,
            # for sm_100 Triton 3.6 fails on a summand of a loop
            ADD_BEHIND=generations.is_newer_than_hopper(self.output),
            num_warps=walk.warps,
            num_stages=walk.stages,
        )

    def launch(self) -> None:
        self.prepare()
        if self.tuning.relates:
            self.relate()
        self.advance()


def extend(
    inputs: Any, dt: Any, *, shape: Shape, tracking: bool = False, tuning: Tuning | None = None, **others: Any
) -> None:
    """Run the launches; Call lists the other parameters, the package the contract."""
    Call(inputs, dt, shape, tracking=tracking, tuning=tuning or tuning_for(shape), **others).launch()
