# SPDX-License-Identifier: Apache-2.0
"""Shared by delta rules, in Triton: a chunk's values and gates, and the inverse of its triangular matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.linear_extend.convolution import (
    LOG2_E,
    chunk_inputs,
    convolved,
    power_of_two,
    turn_window,
)

# 2^-160 is zero in fp32, and fp32 still resolves the sum of 64 such gates
LEAST_GATE = tl.constexpr(-160.0)
# above, softplus is the identity, as in SGLang
SOFTPLUS_LINEAR = tl.constexpr(20.0)
NORM_EPSILON = tl.constexpr(1e-6)
# rows of a diagonal block of the triangular inverse
BLOCK = tl.constexpr(16)


@triton.jit
def convolve_values(
    x,
    weights,
    bias,
    conv,
    output,
    window,
    chunks,
    chunk,
    head,
    first_channel,
    conv_slot,
    conv_channel,
    conv_past,
    real_chunks,
    tail,
    rows_of_output,
    end_of_tail,
    X_ROW: tl.constexpr,
    OUTPUT_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    FIELDS: tl.constexpr,
    TRACK: tl.constexpr,
):
    """Convolve a head's values in a chunk, or clear its output in a chunk of the tail."""
    of_chunk = chunks + chunk * FIELDS
    if chunk < real_chunks:
        first_row = tl.load(of_chunk)
        start = tl.load(of_chunk + 1)
        end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
        slot = tl.load(of_chunk + 3).to(tl.int64)
    else:
        first_row = tail + (chunk - real_chunks) * CHUNK
        start = first_row
        end = end_of_tail
        slot = tl.full([], -1, tl.int64)
    value = head * VALUES + tl.arange(0, VALUES)
    row = (first_row + tl.arange(0, CHUNK // STRIP) * STRIP)[:, None]
    of_row = output + row.to(tl.int64) * OUTPUT_ROW + value[None, :]
    if slot >= 0:
        channels = first_channel + value
        if first_row == start:
            turn_window(
                x, X_ROW, conv, conv_slot, conv_channel, conv_past, window, channels, of_chunk, start, end, slot, WIDTH,
                TRACK,
            )  # fmt: skip
            tl.debug_barrier()
        v = chunk_inputs(x, window, channels, start, end, first_row, X_ROW, WIDTH, STRIP, CHUNK)
        v = convolved(v, weights, bias, channels, WIDTH, STRIP, HAS_BIAS)
        # stored where the output will be: the reader overwrites the values
        for number in tl.static_range(STRIP):
            tl.store(of_row + number * OUTPUT_ROW, v[number].to(output.dtype.element_ty), mask=row < end - number)
        # the next item reuses the window
        tl.debug_barrier()
    else:
        nothing = tl.zeros([CHUNK // STRIP, VALUES], output.dtype.element_ty)
        for number in tl.static_range(STRIP):
            tl.store(of_row + number * OUTPUT_ROW, nothing, mask=row < end - number)


@triton.jit
def forgetting(x, rate):
    """Compute gates, base 2: -rate softplus(x)."""
    soft = tl.where(x <= SOFTPLUS_LINEAR, tl.log(1.0 + tl.exp(x)), x)
    return -rate * soft * LOG2_E


@triton.jit
def bounded(gate):
    """Keep gates where fp32 resolves a chunk's sum of them."""
    return tl.maximum(gate, LEAST_GATE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def invert_blocks(below, inverse, BLOCKS: tl.constexpr):
    """Invert I + below for BLOCKS strictly lower triangular blocks of 16, in fp32, one column a thread."""
    # the number of threads is a power of two, so several may solve the last column, with equal results
    column = tl.minimum(tl.arange(0, power_of_two(BLOCKS * BLOCK)), BLOCKS * BLOCK - 1)
    first = column // BLOCK * (BLOCK * BLOCK)
    solved = ()
    for row in tl.static_range(BLOCK):
        x = tl.where(column % BLOCK == row, 1.0, 0.0)
        for earlier in tl.static_range(row):
            x -= tl.load(below + first + row * BLOCK + earlier) * solved[earlier]
        solved += (x,)  # type: ignore[assignment]
    # store after the last load: the compiler would order later loads behind stores
    for row in tl.static_range(BLOCK):
        tl.store(inverse + first + row * BLOCK + column % BLOCK, solved[row])


@triton.jit
def merge(inverse, below, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Combine inverses of diagonal blocks of size HALF into those of twice the size.

    An inverse's entries are k_i.(contractions) k_j and so at most 1: fp16 rounds them as finely as tf32 would.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    between = (row // (2 * HALF) == column // (2 * HALF)) & (row // HALF > column // HALF)
    rounded = inverse.to(tl.float16)
    left = tl.dot(rounded, tl.where(between, below, 0.0))
    return inverse - tl.dot(left.to(tl.float16), rounded)
