# SPDX-License-Identifier: Apache-2.0
"""Extend of a short convolution in one Triton kernel, with the same launch for every batch of a captured graph.

It is parallel over tokens, persistent, and reads its work from the tables on the device. A chunk begins where its
sequence does, so nothing depends on neighbours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.linear_extend.convolution import chunk_inputs, power_of_two, summed, turn_window
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK_FIELDS, Tables
from sglang_bcg_fixes.kernels.short_conv_extend import Shape
from sglang_bcg_fixes.model import Accepted, Rejected

__all__ = ["Scratch", "Tables", "Tuning", "extend", "ready", "tuning_for"]


@triton.jit(do_not_specialize=["rows_of_output", "max_chunks"])
def convolve(
    x,
    weights,
    bias,
    conv,
    windows,
    output,
    chunks,
    counts,
    conv_slot,
    conv_channel,
    conv_past,
    rows_of_output,
    max_chunks,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    TILE: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Process work items: each chunk's channels by TILE, then the tail of zeros."""
    TILES: tl.constexpr = CHANNELS // TILE
    WINDOW: tl.constexpr = power_of_two(WIDTH - 1) * TILE
    real_chunks = tl.minimum(tl.load(counts), max_chunks)
    tail = tl.load(counts + 1)
    behind = tl.cdiv(tl.maximum(rows_of_output - tail, 0), CHUNK)
    own_window = windows + tl.program_id(0) * WINDOW
    for item in range(tl.program_id(0), (real_chunks + behind) * TILES, tl.num_programs(0)):
        chunk = item // TILES
        is_real = chunk < real_chunks
        of_chunk = chunks + tl.where(is_real, chunk, 0) * FIELDS
        first_row = tail + (chunk - real_chunks) * CHUNK
        start = first_row
        end = rows_of_output
        slot = tl.full([], -1, tl.int64)
        if is_real:
            first_row = tl.load(of_chunk)
            start = tl.load(of_chunk + 1)
            end = tl.minimum(tl.load(of_chunk + 2), rows_of_output)
            slot = tl.load(of_chunk + 3).to(tl.int64)
        channels = (item % TILES) * TILE + tl.arange(0, TILE)
        row = (first_row + tl.arange(0, CHUNK // STRIP) * STRIP)[:, None]
        into = output + row.to(tl.int64) * CHANNELS + channels[None, :]
        if slot >= 0:
            if first_row == start:
                turn_window(
                    x, X_ROW, conv, conv_slot, conv_channel, conv_past, own_window, channels, of_chunk, start, end,
                    slot, WIDTH, TRACK=False,
                )  # fmt: skip
                tl.debug_barrier()
            taken = chunk_inputs(x, own_window, channels, start, end, first_row, X_ROW, WIDTH, STRIP, CHUNK)
            sums = summed(taken, weights, bias, channels, WIDTH, STRIP, HAS_BIAS)
            for number in tl.static_range(STRIP):
                tl.store(into + number * CHANNELS, sums[number].to(output.dtype.element_ty), mask=row < end - number)
            # the next item reuses the window
            tl.debug_barrier()
        else:
            nothing = tl.zeros([CHUNK // STRIP, TILE], output.dtype.element_ty)
            for number in tl.static_range(STRIP):
                tl.store(into + number * CHANNELS, nothing, mask=row < end - number)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Launch parameters, the same for every layer: its bits do not depend on a step's size."""

    programs: int = 2112
    warps: int = 4
    strip: int = 16
    tile: int = 64


TUNING = Tuning()


def tuning_for(shape: Shape) -> Tuning:
    """Return the tuning of a layer of this shape."""
    return TUNING


def tile_of(shape: Shape, tuning: Tuning) -> int:
    """Return the channels of a tile: all tiles are whole."""
    return min(tuning.tile, shape.channels & -shape.channels)


@dataclasses.dataclass
class Scratch:
    """Scratch of one launch; nothing in it outlives the call."""

    # of each program: exchanged between its threads
    windows: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        """Allocate for outputs of any number of rows."""
        of_program = power_of_two(shape.width - 1) * tile_of(shape, tuning)
        return cls(torch.empty(tuning.programs, of_program, dtype=dtype, device=tables.counts.device))


def ready(device: int) -> Accepted | Rejected:
    return generations.is_one_of(device, generations.HOPPER, generations.BLACKWELL)


def extend(
    inputs: Any,
    *,
    shape: Shape,
    conv_weights: Any,
    bias: Any,
    conv: Any,
    tables: Tables,
    scratch: Scratch,
    output: Any,
    tuning: Tuning | None = None,
) -> None:
    """Run one layer, as the package's contract describes."""
    tuning = tuning or tuning_for(shape)
    rows = output.shape[0]
    if rows > tables.max_tokens:
        raise ValueError(f"an output of {rows} rows, but the tables were made for {tables.max_tokens} tokens")
    convolve[(tuning.programs,)](
        inputs,
        conv_weights,
        bias,
        conv,
        scratch.windows,
        output,
        tables.chunks,
        tables.counts,
        *conv.stride(),
        rows,
        tables.max_chunks,
        X_ROW=inputs.stride(0),
        CHANNELS=shape.channels,
        WIDTH=shape.width,
        HAS_BIAS=bias is not None,
        CHUNK=tables.chunk,
        STRIP=tuning.strip,
        TILE=tile_of(shape, tuning),
        FIELDS=CHUNK_FIELDS,
        num_warps=tuning.warps,
        num_stages=1,
    )
