# SPDX-License-Identifier: Apache-2.0
"""Mamba2's extend in CUDA C++ for Hopper: csrc/mamba2_extend/mamba2_extend.cuh.

It shares the tables with triton.py, and falls back to its kernels for what the header has none for.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.cuda import program
from sglang_bcg_fixes.kernels.cuda.driver import Launch
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK, Tables
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, triton
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.mamba2_extend.program import PROGRAM
from sglang_bcg_fixes.kernels.mamba2_extend.triton import Tuning, tuning_for
from sglang_bcg_fixes.model import Accepted, Rejected

__all__ = ["Scratch", "Tables", "Tuning", "extend", "origin", "ready", "tuning_for"]

# the header's structs: pointers, strides, numbers
MAMBA2_PREPARE = struct.Struct("12Q3q9i2fi0q")
MAMBA2_ADVANCE = struct.Struct("9Qq7i0q")
# the same in the header; a test compares them
ROWS, THREADS = 64, 512
PREPARE_THREADS, BLOCKS_OF_MULTIPROCESSOR = 128, 6
# twice the resident blocks, to even out the tail
TURNS = 2
WIDTH = 4
# by states of a row
SHARED_BYTES = {128: 174456, 256: 181840}
TRACKING, FLOAT_D, FLOAT_A, FLOAT_DT_BIAS = 1, 2, 4, 8
# bytes of the widest load of halves, which needs this alignment
PIECE = 8
# bytes of two floats
PAIR = 8
KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
# So many items of a sequence, at most, leave multiprocessors idle; and the least tokens of a segment. Shorter ones cost
# more where a batch has several sequences than they gain where it has one.
FEW_ITEMS, SEGMENT = 64, 1024
# a sequence that has not so many is not cut
LEAST_SEGMENTS = 4


def has_its_sizes(shape: Shape, tables: Tables) -> bool:
    return shape.head % ROWS == 0 and shape.states in SHARED_BYTES and tables.chunk == CHUNK


def segment_of(shape: Shape, tables: Tables) -> int:
    """Return the least tokens of a segment, or 0 if no sequence is cut.

    It must not depend on a batch, because a sequence has the bits of its segments.
    """
    return SEGMENT if has_its_sizes(shape, tables) and shape.inner // ROWS <= FEW_ITEMS else 0


def segment_in(rows: int, shape: Shape, tables: Tables) -> int:
    """Return the same, or 0 if no sequence of an output of so many rows can be long enough to be cut."""
    segment = segment_of(shape, tables)
    return segment if rows >= LEAST_SEGMENTS * segment else 0


@dataclasses.dataclass
class Scratch(triton.Scratch):
    """triton.Scratch, and what `carry` leaves for `advance`."""

    # of each segment and head: the state after it or what it has learnt, then what is left of the one before
    carries: Any
    # of each sequence that is cut, and head: the state before it
    befores: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        segment = segment_in(rows, shape, tables)

        def of_each(tokens: int, states: int) -> Any:
            sizes = (rows // tokens if segment else 0, shape.heads, shape.head * states)
            return torch.empty(*sizes, dtype=torch.float32, device=tables.counts.device)

        return cls(
            **vars(triton.Scratch.for_rows(rows, tables, shape, dtype, tuning)),
            carries=of_each(segment, shape.states + 1),
            befores=of_each(LEAST_SEGMENTS * segment, shape.states),
        )


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The launchers of one device, by operand type, and by states of a row; and its number of multiprocessors."""

    prepare: dict[torch.dtype, Launch]
    carry: dict[tuple[int, torch.dtype], Launch]
    advance: dict[tuple[int, torch.dtype], Launch]
    multiprocessors: int


def ready(device: int) -> Accepted | Rejected:
    """Compile and load for the device; must be called before the first capture."""
    return program.ready(lambda: on_device(device))


def origin(device: int) -> str:
    """Name the source of the machine code, for the log."""
    return program.load(PROGRAM, device).origin


@functools.cache
def on_device(device: int) -> Kernels:
    loaded = program.load(PROGRAM, device)

    def launches(kernel: str) -> dict[tuple[int, torch.dtype], Launch]:
        return {
            (states, kind): loaded.launcher(
                f"bcg_mamba2_{kernel}_{states}_{name}", THREADS, MAMBA2_ADVANCE, shared_bytes
            )
            for states, shared_bytes in SHARED_BYTES.items()
            for kind, name in KINDS.items()
        }

    prepare = {
        kind: loaded.launcher(f"bcg_mamba2_prepare_{name}", PREPARE_THREADS, MAMBA2_PREPARE)
        for kind, name in KINDS.items()
    }
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(prepare, launches("carry"), launches("advance"), multiprocessors)


@dataclasses.dataclass(frozen=True)
class Call(triton.Call):
    """triton.Call with the launches that csrc has a kernel for."""

    scratch: Scratch

    @property
    def has_kernel(self) -> bool:
        return (
            has_its_sizes(self.shape, self.tables)
            and self.state.dtype == torch.float32
            # read and written by twos
            and self.state.stride(0) % 2 == 0
            and self.state.data_ptr() % PAIR == 0
            and self.D.dtype in (self.output.dtype, torch.float32)
        )

    @property
    def can_prepare(self) -> bool:
        rows, kind = self.inputs, self.inputs.dtype
        read_whole = [rows, self.conv_weights, *([] if self.bias is None else [self.bias])]
        return (
            self.has_kernel
            and self.shape.width == WIDTH
            and rows.stride(0) * rows.element_size() % PIECE == 0
            and all(each.data_ptr() % PIECE == 0 for each in read_whole)
            and all(each.dtype == kind for each in (*read_whole, self.dt, self.conv, self.output))
            and self.A.dtype in (kind, torch.float32)
            and self.dt_bias.dtype in (kind, torch.float32)
        )

    def prepare(self) -> None:
        if not self.can_prepare:
            # `advance` reports the rest
            if self.has_kernel:
                rows = f"rows {self.inputs.stride(0)} numbers apart"
                named = ("inputs", "dt", "conv_weights", "bias", "conv", "A", "dt_bias")
                kinds = ", ".join(f"{name} in {getattr(getattr(self, name), 'dtype', None)}" for name in named)
                active.leave_to_triton(KERNEL.op, f"prepare of {self.shape}, {rows}, {kinds}")
            super().prepare()
            return
        scratch, tables, shape = self.scratch, self.tables, self.shape
        kernels = on_device(self.output.get_device())
        flags = self.tracking * TRACKING
        flags += (self.A.dtype == torch.float32) * FLOAT_A
        flags += (self.dt_bias.dtype == torch.float32) * FLOAT_DT_BIAS
        kernels.prepare[self.output.dtype](
            TURNS * BLOCKS_OF_MULTIPROCESSOR * kernels.multiprocessors,
            self.inputs.data_ptr(),
            self.dt.data_ptr(),
            self.conv_weights.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            self.A.data_ptr(),
            self.dt_bias.data_ptr(),
            self.conv.data_ptr(),
            scratch.mixed.data_ptr(),
            scratch.gates.data_ptr(),
            self.output.data_ptr(),
            tables.chunks.data_ptr(),
            tables.counts.data_ptr(),
            *self.conv.stride(),
            self.inputs.stride(0),
            self.dt.stride(0),
            self.output.shape[0],
            scratch.mixed.shape[1],
            scratch.gates.shape[0],
            shape.heads,
            shape.inner,
            shape.states,
            shape.channels,
            shape.least_step,
            shape.most_step,
            flags,
        )

    def relate(self) -> None:
        if not self.has_kernel:
            super().relate()

    def advance(self) -> None:
        if not self.has_kernel:
            states = f"states in {self.state.dtype} with the strides {self.state.stride()}"
            active.leave_to_triton(KERNEL.op, f"advance of {self.shape}, {states}, D in {self.D.dtype}")
            super().advance()
            return
        scratch, tables, shape = self.scratch, self.tables, self.shape
        segment = segment_in(self.output.shape[0], shape, tables)
        kernels = on_device(self.output.get_device())
        parameters = (
            kernels.multiprocessors,
            scratch.mixed.data_ptr(),
            scratch.gates.data_ptr(),
            self.D.data_ptr(),
            self.output.data_ptr(),
            self.state.data_ptr(),
            scratch.carries.data_ptr(),
            scratch.befores.data_ptr(),
            tables.sequences.data_ptr(),
            tables.counts.data_ptr(),
            self.state.stride(0),
            self.output.shape[0],
            scratch.mixed.shape[1],
            shape.heads,
            shape.groups,
            shape.head,
            segment,
            self.tracking * TRACKING + (self.D.dtype == torch.float32) * FLOAT_D,
        )
        for launch in (kernels.carry, kernels.advance) if segment else (kernels.advance,):
            launch[shape.states, self.output.dtype](*parameters)


def extend(
    inputs: Any, dt: Any, *, shape: Shape, tracking: bool = False, tuning: Tuning | None = None, **others: Any
) -> None:
    """Run the launches: prepare and advance, with carry in between for an output in which a sequence may be cut.

    triton.Call lists the other parameters, the package the contract.
    """
    Call(inputs, dt, shape, tracking=tracking, tuning=tuning or tuning_for(shape), **others).launch()
