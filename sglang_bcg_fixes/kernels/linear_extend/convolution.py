# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution of linear layers, in Triton: a chunk of it, and the windows of its pool."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def power_of_two(number: int) -> int:
    """Round up to a power of two; of `width - 1` it is the rows of a window's tile."""
    return 1 << (number - 1).bit_length()


@triton.jit
def window_before(x, x_row, conv, conv_channel, conv_past, channels, start, end, has_window, WIDTH: tl.constexpr):
    """Load the inputs that a convolution at `end` looks back at, [PAST, channels], some from the slot."""
    past = tl.arange(0, power_of_two(WIDTH - 1))[:, None]
    position = end - (WIDTH - 1) + past
    moved = WIDTH - 1 + position - start
    exists = past < WIDTH - 1
    is_new = exists & (position >= start)
    new = tl.load(x + position.to(tl.int64) * x_row + channels[None, :], mask=is_new, other=0.0)
    old = tl.load(
        conv + channels[None, :] * conv_channel + moved * conv_past, mask=exists & ~is_new & has_window, other=0.0
    )
    return tl.where(is_new, new.to(old.dtype), old)


@triton.jit
def turn_window(
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
    TRACK: tl.constexpr,
):
    """Copy a sequence's old window to `before` [PAST, channels] and write the new one to the pool.

    Only the program of the first chunk reads or writes these channels of the pool.
    """
    past = tl.arange(0, power_of_two(WIDTH - 1))[:, None]
    in_slot = channels[None, :] * conv_channel + past * conv_past
    own = conv + slot * conv_slot
    exists = past < WIDTH - 1
    has_window = tl.load(of_chunk + 4) != 0
    window = tl.load(own + in_slot, mask=exists & has_window, other=0.0)
    after = window_before(x, x_row, own, conv_channel, conv_past, channels, start, end, has_window, WIDTH)
    track_slot = slot
    at_checkpoint = after
    if TRACK:
        boundary = start + tl.load(of_chunk + 5)
        track_slot = tl.load(of_chunk + 6).to(tl.int64)
        if track_slot >= 0:
            at_checkpoint = window_before(
                x, x_row, own, conv_channel, conv_past, channels, start, boundary, has_window, WIDTH
            )
    # all threads must have read before any of them overwrites
    tl.debug_barrier()
    tl.store(before + past * channels.shape[0] + tl.arange(0, channels.shape[0])[None, :], window, mask=exists)
    tl.store(own + in_slot, after, mask=exists)
    if TRACK and track_slot >= 0:
        tl.store(conv + track_slot * conv_slot + in_slot, at_checkpoint, mask=exists)


@triton.jit
def chunk_inputs(
    x,
    before,
    channels,
    start,
    end,
    first_row,
    X_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Load a chunk's inputs and those just before it: a tuple of tensors [CHUNK / STRIP, channels].

    The n-th has rows n - (WIDTH - 1), n - (WIDTH - 1) + STRIP and so on: each row is read once, for all taps.
    """
    row = (first_row + tl.arange(0, CHUNK // STRIP) * STRIP)[:, None]
    of_row = x + row.to(tl.int64) * X_ROW + channels[None, :]
    of_window = before + (row - start) * channels.shape[0] + tl.arange(0, channels.shape[0])[None, :]
    inputs = ()
    for number in tl.static_range(WIDTH - 1):
        inside = (row >= start + (WIDTH - 1 - number)) & (row < end + (WIDTH - 1 - number))
        taken = tl.load(of_row + (number - (WIDTH - 1)) * X_ROW, mask=inside, other=0.0)
        # in a sequence's first chunk the window; one of the two loads is always zero
        earlier = row < start + (WIDTH - 1 - number)
        taken += tl.load(of_window + number * channels.shape[0], mask=earlier, other=0.0)
        inputs += (taken,)  # type: ignore[assignment]
    for number in tl.static_range(STRIP):
        inputs += (tl.load(of_row + number * X_ROW, mask=row < end - number, other=0.0),)  # type: ignore[assignment]
    return inputs


@triton.jit
def summed(inputs, weights, bias, channels, WIDTH: tl.constexpr, STRIP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Compute the causal convolution, in fp32: the tuple's n-th has rows n, n + STRIP and so on."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(weights + channels * WIDTH + tap).to(tl.float32)[None, :],)  # type: ignore[assignment]
    wide = ()
    for number in tl.static_range(STRIP + WIDTH - 1):
        wide += (inputs[number].to(tl.float32),)  # type: ignore[assignment]
    outputs = ()
    for number in tl.static_range(STRIP):
        mixed = wide[number] * taps[0]  # type: ignore[misc]
        for tap in tl.static_range(1, WIDTH):
            mixed += wide[number + tap] * taps[tap]
        if HAS_BIAS:
            mixed += tl.load(bias + channels).to(tl.float32)[None, :]
        outputs += (mixed,)  # type: ignore[assignment]
    return outputs


@triton.jit
def convolved(inputs, weights, bias, channels, WIDTH: tl.constexpr, STRIP: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Apply SiLU to the causal convolution."""
    sums = summed(inputs, weights, bias, channels, WIDTH, STRIP, HAS_BIAS)
    outputs = ()
    for number in tl.static_range(STRIP):
        mixed = sums[number]
        outputs += (libdevice.fast_dividef(mixed, 1.0 + tl.exp2(-LOG2_E * mixed)),)  # type: ignore[assignment]
    return outputs
