"""The gated delta rule's extend in two Triton kernels, launched alike for every batch that a captured graph will see.

`prepare` is parallel over tokens: convolution, gates, norms, and of each chunk the 64x64 matrices. `advance` goes along
each sequence: state and output. Both are persistent: what there is to do stands in the tables, on the device.

In one chunk, with G the running sum of the gates from the chunk's first token on, S [values, keys] the state before it:

    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j, j < i      T = (I + A)^-1 diag(beta)
    P[i, j] = exp(G_i - G_j) q_i.k_j, j <= i            r_i = v_i - exp(G_i) S k_i
    n = T r                                             output_i = exp(G_i) S q_i + sum_j P[i, j] n_j
    S after it = exp(G_last) S + sum_j exp(G_last - G_j) n_j k_j^T

Every exponent is a difference that is never positive. `advance` keeps S, r and n with values along the rows: what one
product leaves in registers is then the next one's left operand in registers, and the chain crosses no shared memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice

from sglang_bcg_fixes.kernels.gdn_extend import Shape
from sglang_bcg_fixes.kernels.gdn_extend.metadata import CHUNK_FIELDS, SEQUENCE_FIELDS, Tables

# two to the -160th is zero in fp32, and 64 such gates are a sum that fp32 still resolves
LEAST_GATE = tl.constexpr(-160.0)
LOG2_E = tl.constexpr(1.4426950408889634)
# above, softplus is the identity, as in SGLang
SOFTPLUS_LINEAR = tl.constexpr(20.0)
NORM_EPSILON = tl.constexpr(1e-6)
# rows that one thread convolves together
STRIP = tl.constexpr(8)
# a diagonal block of the triangular inverse
BLOCK = tl.constexpr(16)


@triton.jit
def _window_before(x, x_row, before, channels, start, end, WIDTH: tl.constexpr, PAST: tl.constexpr):
    """What a convolution at `end` looks back at: of a short sequence also what came before it."""
    past = tl.arange(0, PAST)
    channel = tl.arange(0, channels.shape[0])
    position = end - (WIDTH - 1) + past
    moved = WIDTH - 1 + position - start
    is_new = (past < WIDTH - 1) & (position >= start)
    new = tl.load(x + position[:, None].to(tl.int64) * x_row + channels[None, :], mask=is_new[:, None], other=0.0)
    old = tl.load(
        before + moved[:, None] * channels.shape[0] + channel[None, :], mask=(moved < WIDTH - 1)[:, None], other=0.0
    )
    return tl.where(is_new[:, None], new.to(old.dtype), old)


@triton.jit
def _turn_window(
    x,
    x_row,
    conv,
    conv_slot,
    conv_channel,
    conv_past,
    before,
    channels,
    of_chunk,
    start,
    end,
    slot,
    WIDTH: tl.constexpr,
    PAST: tl.constexpr,
    TRACK: tl.constexpr,
):
    """A sequence's window as it was goes to `before` [past, channels]; into the pool goes what the next step needs.

    Only the program of the first chunk reads or writes these channels of the pool.
    """
    past = tl.arange(0, PAST)
    channel = tl.arange(0, channels.shape[0])
    in_slot = channels[None, :] * conv_channel + past[:, None] * conv_past
    exists = (past < WIDTH - 1)[:, None]
    has_window = tl.load(of_chunk + 4) != 0
    window = tl.load(conv + slot * conv_slot + in_slot, mask=exists & has_window, other=0.0)
    tl.store(before + past[:, None] * channels.shape[0] + channel[None, :], window, mask=exists)
    # what one thread has written others read, and what others have read one thread overwrites
    tl.debug_barrier()
    window = _window_before(x, x_row, before, channels, start, end, WIDTH, PAST)
    tl.store(conv + slot * conv_slot + in_slot, window, mask=exists)
    if TRACK:
        track_after = tl.load(of_chunk + 5)
        track_slot = tl.load(of_chunk + 6).to(tl.int64)
        if track_slot >= 0:
            window = _window_before(x, x_row, before, channels, start, start + track_after, WIDTH, PAST)
            tl.store(conv + track_slot * conv_slot + in_slot, window, mask=exists)
    tl.debug_barrier()


@triton.jit
def _convolved(
    x,
    x_row,
    weights,
    bias,
    before,
    channels,
    start,
    end,
    first_row,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """SiLU of the causal convolution in fp32: a tuple of STRIP tensors [CHUNK / STRIP, channels].

    The n-th has rows n, n + STRIP, ...: each input is then read and widened once, for all taps that want it.
    """
    channel = tl.arange(0, channels.shape[0])
    strip = first_row + tl.arange(0, CHUNK // STRIP) * STRIP
    inputs = ()
    for number in tl.static_range(STRIP + WIDTH - 1):
        position = strip + (number - (WIDTH - 1))
        taken = tl.load(
            x + position[:, None].to(tl.int64) * x_row + channels[None, :],
            mask=((position >= start) & (position < end))[:, None],
            other=0.0,
        ).to(tl.float32)
        if number < WIDTH - 1 and first_row == start:
            at = (WIDTH - 1 + position - start)[:, None] * channels.shape[0] + channel[None, :]
            taken += tl.load(before + at, mask=(position < start)[:, None], other=0.0).to(tl.float32)
        inputs += (taken,)  # type: ignore[assignment]
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(weights + channels * WIDTH + tap).to(tl.float32)[None, :],)  # type: ignore[assignment]
    outputs = ()
    for number in tl.static_range(STRIP):
        mixed = inputs[number] * taps[0]  # type: ignore[misc]
        for tap in tl.static_range(1, WIDTH):
            mixed += inputs[number + tap] * taps[tap]
        if HAS_BIAS:
            mixed += tl.load(bias + channels).to(tl.float32)[None, :]
        outputs += (libdevice.fast_dividef(mixed, 1.0 + tl.exp2(-LOG2_E * mixed)),)  # type: ignore[assignment]
    return outputs


@triton.jit
def _store_row(output, row, end, head, value, values, VALUE_HEADS: tl.constexpr):
    at = (row.to(tl.int64)[:, None] * VALUE_HEADS + head) * value.shape[0] + value[None, :]
    tl.store(output + at, values.to(output.dtype.element_ty), mask=(row < end)[:, None])


@triton.jit
def _normed(
    x,
    x_row,
    weights,
    bias,
    before,
    channels,
    start,
    end,
    first_row,
    scale,
    into,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Queries or keys of a chunk, of length `scale`."""
    mixed = _convolved(x, x_row, weights, bias, before, channels, start, end, first_row, WIDTH, HAS_BIAS, CHUNK)
    channel = tl.arange(0, channels.shape[0])
    for number in tl.static_range(STRIP):
        row = first_row + tl.arange(0, CHUNK // STRIP) * STRIP + number
        normed = mixed[number] * (scale / tl.sqrt(tl.sum(mixed[number] * mixed[number], 1) + NORM_EPSILON))[:, None]
        kept = into + row[:, None] * channels.shape[0] + channel[None, :]
        tl.store(kept, normed.to(into.dtype.element_ty), mask=(row < end)[:, None])


@triton.jit
def _invert_blocks(below, inverse, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """(I + below)^-1 of every diagonal block of 16 of several chunks, by substitution in fp32: a column a thread."""
    column = tl.arange(0, COLUMNS)
    # of the block that this column is in: its first row, in its chunk
    first = column // CHUNK * CHUNK * CHUNK + column % CHUNK // BLOCK * BLOCK * CHUNK
    of_block = below + first + column % CHUNK // BLOCK * BLOCK
    solved = ()
    for row in tl.static_range(BLOCK):
        x = tl.where(column % BLOCK == row, 1.0, 0.0)
        for earlier in tl.static_range(row):
            x -= tl.load(of_block + row * CHUNK + earlier) * solved[earlier]
        tl.store(inverse + first + row * CHUNK + column % CHUNK, x)
        solved += (x,)  # type: ignore[assignment]


@triton.jit
def _merge(inverse, below, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """From the inverses of diagonal blocks of size HALF to those of twice the size.

    An inverse's entries are k_i.(contractions) k_j and so at most 1: fp16 rounds them as finely as tf32 would.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    between = (row // (2 * HALF) == column // (2 * HALF)) & (row // HALF > column // HALF)
    between_blocks = tl.load(below + row * CHUNK + column, mask=between, other=0.0).to(tl.float16)
    rounded = inverse.to(tl.float16)
    left = tl.dot(rounded, between_blocks)
    return inverse - tl.dot(left.to(tl.float16), rounded)


@triton.jit
def _gates(a, a_row, A_log, dt_bias, head, rows, real):
    """The running sum of a chunk's gates, in powers of two."""
    x = tl.load(a + rows.to(tl.int64) * a_row + head, mask=real, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head).to(tl.float32)
    soft = tl.where(x <= SOFTPLUS_LINEAR, tl.log(1.0 + tl.exp(x)), x)
    gate = -tl.exp(tl.load(A_log + head).to(tl.float32)) * soft * LOG2_E
    gate = tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)
    return tl.cumsum(tl.where(real, gate, 0.0), 0)


@triton.jit(do_not_specialize=["rows_of_output", "capacity"])
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
    gates,
    workspace,
    windows,
    output,
    chunks,
    counts,
    x_row,
    a_row,
    b_row,
    conv_slot,
    conv_channel,
    conv_past,
    rows_of_output,
    capacity,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    TRACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Items of work: every chunk's matrices by key head, then its values by value head, then the tail to zero."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    if OVERLAP:
        cuda.gdc_launch_dependents()
    real_chunks = tl.load(counts)
    tokens = tl.load(counts + 1)
    matrix_items = real_chunks * KEY_HEADS
    tail_chunks = tl.cdiv(tl.maximum(rows_of_output - tokens, 0), CHUNK)
    items = matrix_items + (real_chunks + tail_chunks) * VALUE_HEADS
    in_chunk = tl.arange(0, CHUNK)
    tile = in_chunk[:, None] * CHUNK + in_chunk[None, :]
    own_below = workspace + tl.program_id(0) * (GROUP * 2 * CHUNK * (CHUNK + 1))
    own_window = windows + tl.program_id(0) * (PAST * max(KEYS, VALUES))
    own_inverse = own_below + GROUP * CHUNK * CHUNK
    own_gates = own_inverse + GROUP * CHUNK * CHUNK
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
                of_key_head = key_head * capacity * KEYS
                channels = key_head * KEYS + key
                if first_row == start:
                    _turn_window(
                        x, x_row, conv, conv_slot, conv_channel, conv_past, own_window, channels, of_chunk, start, end,
                        slot, WIDTH, PAST, TRACK,
                    )  # fmt: skip
                _normed(
                    x,
                    x_row,
                    weights,
                    bias,
                    own_window,
                    channels,
                    start,
                    end,
                    first_row,
                    scale,
                    queries + of_key_head,
                    WIDTH,
                    HAS_BIAS,
                    CHUNK,
                )
                tl.debug_barrier()
                channels = (KEY_HEADS + key_head) * KEYS + key
                if first_row == start:
                    _turn_window(
                        x, x_row, conv, conv_slot, conv_channel, conv_past, own_window, channels, of_chunk, start, end,
                        slot, WIDTH, PAST, TRACK,
                    )  # fmt: skip
                _normed(
                    x,
                    x_row,
                    weights,
                    bias,
                    own_window,
                    channels,
                    start,
                    end,
                    first_row,
                    1.0,
                    keys + of_key_head,
                    WIDTH,
                    HAS_BIAS,
                    CHUNK,
                )
                for member in tl.static_range(GROUP):
                    head = key_head * GROUP + member
                    gate = _gates(a, a_row, A_log, dt_bias, head, rows, real)
                    gain = tl.load(b + rows.to(tl.int64) * b_row + head, mask=real, other=0.0).to(tl.float32)
                    tl.store(own_gates + member * 2 * CHUNK + in_chunk, gate)
                    tl.store(own_gates + (member * 2 + 1) * CHUNK + in_chunk, tl.where(real, tl.sigmoid(gain), 0.0))
                    tl.store(gates + head * capacity + rows, gate, mask=real)
                # read again by other threads, and gates instead of computed again for every layout
                tl.debug_barrier()
                kept = of_key_head + rows[:, None] * KEYS + key[None, :]
                q = tl.load(queries + kept, mask=real[:, None], other=0.0)
                k = tl.load(keys + kept, mask=real[:, None], other=0.0)
                kk = tl.dot(k, tl.trans(k))
                qk = tl.dot(q, tl.trans(k))
                for member in tl.static_range(GROUP):
                    head = key_head * GROUP + member
                    gate = tl.load(own_gates + member * 2 * CHUNK + in_chunk)
                    gain = tl.load(own_gates + (member * 2 + 1) * CHUNK + in_chunk)
                    not_earlier = in_chunk[:, None] >= in_chunk[None, :]
                    decay = tl.exp2(tl.where(not_earlier, gate[:, None] - gate[None, :], -float("inf")))
                    # its upper half is never read
                    tl.store(own_below + member * CHUNK * CHUNK + tile, kk * decay * gain[:, None])
                    kept = (head * capacity + rows)[:, None] * CHUNK + in_chunk[None, :]
                    tl.store(scores + kept, (qk * decay).to(scores.dtype.element_ty), mask=real[:, None])
                tl.debug_barrier()
                _invert_blocks(own_below, own_inverse, GROUP * CHUNK, CHUNK)
                tl.debug_barrier()
                for member in tl.static_range(GROUP):
                    head = key_head * GROUP + member
                    below = own_below + member * CHUNK * CHUNK
                    on_diagonal = in_chunk[:, None] // BLOCK == in_chunk[None, :] // BLOCK
                    inverse = tl.load(own_inverse + member * CHUNK * CHUNK + tile, mask=on_diagonal, other=0.0)
                    if CHUNK >= 32:
                        inverse = _merge(inverse, below, 16, CHUNK)
                    if CHUNK >= 64:
                        inverse = _merge(inverse, below, 32, CHUNK)
                    inverse *= tl.load(own_gates + (member * 2 + 1) * CHUNK + in_chunk)[None, :]
                    kept = (head * capacity + rows)[:, None] * CHUNK + in_chunk[None, :]
                    tl.store(inverses + kept, inverse.to(inverses.dtype.element_ty), mask=real[:, None])
                # the next item of this program writes there
                tl.debug_barrier()
        else:
            chunk = (item - matrix_items) // VALUE_HEADS
            head = (item - matrix_items) % VALUE_HEADS
            of_chunk = chunks + chunk * FIELDS
            if chunk < real_chunks:
                first_row = tl.load(of_chunk)
                start = tl.load(of_chunk + 1)
                end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
                slot = tl.load(of_chunk + 3).to(tl.int64)
            else:
                first_row = tokens + (chunk - real_chunks) * CHUNK
                start = first_row
                end = rows_of_output
                slot = tl.full([], -1, tl.int64)
            value = tl.arange(0, VALUES)
            strips = first_row + tl.arange(0, CHUNK // STRIP) * STRIP
            if slot >= 0:
                channels = 2 * KEY_HEADS * KEYS + head * VALUES + value
                if first_row == start:
                    _turn_window(
                        x, x_row, conv, conv_slot, conv_channel, conv_past, own_window, channels, of_chunk, start, end,
                        slot, WIDTH, PAST, TRACK,
                    )  # fmt: skip
                mixed = _convolved(
                    x, x_row, weights, bias, own_window, channels, start, end, first_row, WIDTH, HAS_BIAS, CHUNK
                )
                # where the output will stand: who reads the values overwrites them
                for number in tl.static_range(STRIP):
                    _store_row(output, strips + number, end, head, value, mixed[number], VALUE_HEADS)
                tl.debug_barrier()
            else:
                for number in tl.static_range(STRIP):
                    nothing = tl.zeros([CHUNK // STRIP, VALUES], tl.float32)
                    _store_row(output, strips + number, end, head, value, nothing, VALUE_HEADS)


@triton.jit(do_not_specialize=["rows_of_output", "capacity"])
def advance(
    queries,
    keys,
    inverses,
    scores,
    gates,
    output,
    state,
    sequences,
    counts,
    state_slot,
    rows_of_output,
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
    """Items of work: PART values of a head of a sequence, the longest sequences first."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: tl.constexpr = VALUES // PART
    items = tl.load(counts + 2) * (VALUE_HEADS * PARTS)
    in_chunk = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    if OVERLAP:
        cuda.gdc_wait()
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        of_sequence = sequences + (item // (VALUE_HEADS * PARTS)) * FIELDS
        start = tl.load(of_sequence)
        end = tl.minimum(tl.load(of_sequence + 1), rows_of_output)
        slot = tl.load(of_sequence + 2).to(tl.int64)
        head = (item // PARTS) % VALUE_HEADS
        value = (item % PARTS) * PART + tl.arange(0, PART)
        of_state = state + slot * state_slot + (head * VALUES + value)[:, None] * KEYS + key[None, :]
        # with a checkpoint the sequence is gone along in two parts
        middle = start
        track_slot = slot
        if TRACK:
            middle += tl.maximum(tl.load(of_sequence + 3), 0)
            track_slot = tl.load(of_sequence + 4).to(tl.int64)
        S = tl.load(of_state)
        for piece in range(2 if TRACK else 1):
            first = start
            last_row = end
            if TRACK:
                first = tl.where(piece == 0, start, middle)
                last_row = tl.where(piece == 0, middle, end)
            for first_row in tl.range(first, last_row, CHUNK, num_stages=STAGES):
                rows = first_row + in_chunk
                real = rows < end
                # past the end the last row again: no neighbour is read, and what comes of it is multiplied by zero
                taken = tl.minimum(rows, end - 1)
                at = ((head // GROUP) * capacity + taken)[:, None] * KEYS + key[None, :]
                k = tl.load(keys + at)
                q = tl.load(queries + at)
                at = (head * capacity + taken)[:, None] * CHUNK + in_chunk[None, :]
                T = tl.load(inverses + at)
                P = tl.load(scores + at)
                v = tl.load(output + (taken.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUES + value[None, :])
                gate = tl.load(gates + head * capacity + taken)
                last = tl.load(gates + head * capacity + tl.minimum(first_row + CHUNK, end) - 1)
                from_start = tl.exp2(gate)
                to_end = tl.where(real, tl.exp2(last - gate), 0.0)
                # the values as an operand, not as a summand: they then never pass through registers
                n = tl.dot(tl.trans(v), tl.trans(T))
                rounded = S.to(keys.dtype.element_ty)
                known = tl.dot(rounded, tl.trans(k)) * -from_start[None, :]
                n = tl.dot(known.to(keys.dtype.element_ty), tl.trans(T), acc=n)
                o = tl.dot(rounded, tl.trans(q)) * from_start[None, :]
                S = tl.dot((n * to_end[None, :]).to(keys.dtype.element_ty), k, acc=S * tl.exp2(last))
                o = tl.dot(n.to(keys.dtype.element_ty), tl.trans(P), acc=o)
                of_output = output + (rows.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUES + value[None, :]
                tl.store(of_output, tl.trans(o.to(output.dtype.element_ty)), mask=real[:, None])
            if TRACK and (piece == 0) & (track_slot >= 0):
                tl.store(of_state + (track_slot - slot) * state_slot, S)
        tl.store(of_state, S)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the two kernels are launched; alike for every batch, so that a batch's bits do not depend on its bucket."""

    prepare_programs: int = 396
    prepare_warps: int = 4
    prepare_registers: int | None = 168
    advance_programs: int = 132
    advance_warps: int = 4
    advance_stages: int = 3
    part: int = 64
    overlap: bool = False


@dataclasses.dataclass
class Scratch:
    """What `prepare` leaves for `advance`; nothing in it outlives the call."""

    queries: Any
    keys: Any
    inverses: Any
    scores: Any
    gates: Any
    # of each program of `prepare` what its threads tell one another
    workspace: Any
    windows: Any

    @classmethod
    def for_tokens(cls, tokens: int, shape: Shape, dtype: Any, device: Any, chunk: int, tuning: Tuning) -> Scratch:
        def empty(*sizes: int, kind: Any = dtype) -> Any:
            return torch.empty(*sizes, dtype=kind, device=device)

        programs = tuning.prepare_programs
        of_keys, of_values = (shape.key_heads, tokens), (shape.value_heads, tokens)
        return cls(
            queries=empty(*of_keys, shape.keys),
            keys=empty(*of_keys, shape.keys),
            inverses=empty(*of_values, chunk),
            scores=empty(*of_values, chunk),
            gates=empty(*of_values, kind=torch.float32),
            workspace=empty(
                programs, shape.value_heads // shape.key_heads * 2 * chunk * (chunk + 1), kind=torch.float32
            ),
            windows=empty(programs, triton.next_power_of_2(shape.width - 1) * max(shape.keys, shape.values)),
        )


def registers(limit: int | None) -> dict[str, int]:
    """The compiler's option; it takes no None."""
    return {} if limit is None else {"maxnreg": limit}


def extend(
    mixed_qkv: Any,
    a: Any,
    b: Any,
    *,
    shape: Shape,
    conv_weights: Any,
    bias: Any,
    A_log: Any,
    dt_bias: Any,
    conv: Any,
    state: Any,
    tables: Tables,
    scratch: Scratch,
    output: Any,
    tracking: bool = False,
    tuning: Tuning = Tuning(),
) -> None:
    """Two launches; the package's docstring says what they do."""
    rows = output.shape[0]
    capacity = scratch.gates.shape[1]
    prepare[(tuning.prepare_programs,)](
        mixed_qkv,
        a,
        b,
        conv_weights,
        bias,
        A_log,
        dt_bias,
        conv,
        scratch.queries,
        scratch.keys,
        scratch.inverses,
        scratch.scores,
        scratch.gates,
        scratch.workspace,
        scratch.windows,
        output,
        tables.chunks,
        tables.counts,
        mixed_qkv.stride(0),
        a.stride(0),
        b.stride(0),
        conv.stride(0),
        conv.stride(1),
        conv.stride(2),
        rows,
        capacity,
        shape.keys**-0.5,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEYS=shape.keys,
        VALUES=shape.values,
        WIDTH=shape.width,
        PAST=triton.next_power_of_2(shape.width - 1),
        HAS_BIAS=bias is not None,
        CHUNK=tables.chunk,
        FIELDS=CHUNK_FIELDS,
        TRACK=tracking,
        OVERLAP=tuning.overlap,
        num_warps=tuning.prepare_warps,
        num_stages=1,
        **registers(tuning.prepare_registers),
    )
    advance[(tuning.advance_programs,)](
        scratch.queries,
        scratch.keys,
        scratch.inverses,
        scratch.scores,
        scratch.gates,
        output,
        state,
        tables.sequences,
        tables.counts,
        state.stride(0),
        rows,
        capacity,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEYS=shape.keys,
        VALUES=shape.values,
        PART=min(tuning.part, shape.values),
        CHUNK=tables.chunk,
        FIELDS=SEQUENCE_FIELDS,
        STAGES=tuning.advance_stages,
        TRACK=tracking,
        OVERLAP=tuning.overlap,
        num_warps=tuning.advance_warps,
        num_stages=tuning.advance_stages,
        **({"launch_pdl": True} if tuning.overlap else {}),
    )
