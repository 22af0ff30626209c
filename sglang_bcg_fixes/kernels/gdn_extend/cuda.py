# SPDX-License-Identifier: Apache-2.0
"""Gated delta net's extend in CUDA C++ for Hopper: csrc/gdn_extend/gdn_extend.cuh.

It shares the tables with triton.py, and falls back to its kernels for head sizes other than 128, and to its `advance`
for states in bfloat16.
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
from sglang_bcg_fixes.kernels.gdn_extend import Shape, triton
from sglang_bcg_fixes.kernels.gdn_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from sglang_bcg_fixes.kernels.gdn_extend.triton import Tuning, tuning_for
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK, Tables
from sglang_bcg_fixes.model import Accepted, Rejected

__all__ = ["Scratch", "Tables", "Tuning", "extend", "origin", "ready", "tuning_for"]

# the header's structs: pointers, strides, numbers
GDN_PREPARE = struct.Struct("17Q3q12i0q")
GDN_ADVANCE = struct.Struct("11Qq9i0q")
# the same in the header; a test compares them
KEYS, VALUES, WIDTH = 128, 128, 4
PREPARE_THREADS, PREPARE_SHARED_BYTES, BLOCKS_OF_MULTIPROCESSOR = 128, 43536, 4
THREADS, SHARED_BYTES = 384, 231552
TRACKING, FLOAT_A_LOG, FLOAT_DT_BIAS = 1, 2, 4
KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
# bytes of the widest load, which needs this alignment
PIECE = 16
# bytes of two floats
PAIR = 8
# floats that `carry` leaves of a segment and head
CARRY_SIZE = 2 * VALUES * KEYS
# Value heads of a rank, at most, and tokens of a segment: so few heads leave multiprocessors idle with one sequence.
# benchmarks/results/gdn_segments.json compares others.
SEGMENTS = ((8, 1024), (16, 2048))
# a shorter sequence is not cut
LEAST_SEGMENTS = 4


def has_its_sizes(shape: Shape, tables: Tables) -> bool:
    return (shape.keys, shape.values, tables.chunk) == (KEYS, VALUES, CHUNK)


def segment_of(shape: Shape, tables: Tables, kind: torch.dtype) -> int:
    """Return the tokens of a segment, or 0 if no sequence is cut.

    It must not depend on a batch, because a sequence has the bits of its segments. In float16 none is cut: what a
    segment makes of zeros can be larger than any state of the sequence, and overflow where they do not.
    """
    if kind != torch.bfloat16 or tables.span < tables.max_tokens or not has_its_sizes(shape, tables):
        return 0
    return next((tokens for heads, tokens in SEGMENTS if shape.value_heads <= heads), 0)


@dataclasses.dataclass
class Scratch(triton.Scratch):
    """triton.Scratch, and what `carry` leaves for `advance`."""

    carries: Any

    @classmethod
    def for_rows(cls, rows: int, tables: Tables, shape: Shape, dtype: Any, tuning: Tuning) -> Scratch:
        segment = segment_of(shape, tables, dtype)
        segments = rows // segment if segment else 0
        carries = torch.empty(segments, shape.value_heads, CARRY_SIZE, dtype=torch.float32, device=tables.counts.device)
        return cls(**vars(triton.Scratch.for_rows(rows, tables, shape, dtype, tuning)), carries=carries)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The launchers of one device, by operand type, and its number of multiprocessors."""

    prepare: dict[torch.dtype, Launch]
    advance: dict[torch.dtype, Launch]
    carry: dict[torch.dtype, Launch]
    advance_segments: dict[torch.dtype, Launch]
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

    def launches(kernel: str, threads: int, layout: struct.Struct, shared_bytes: int) -> dict[torch.dtype, Launch]:
        return {
            kind: loaded.launcher(f"{kernel}_{name}", threads, layout, shared_bytes) for kind, name in KINDS.items()
        }

    return Kernels(
        prepare=launches("bcg_gdn_prepare", PREPARE_THREADS, GDN_PREPARE, PREPARE_SHARED_BYTES),
        advance=launches("bcg_gdn_advance", THREADS, GDN_ADVANCE, SHARED_BYTES),
        # these two in float16 only for tests, which can demand more of it
        carry=launches("bcg_gdn_carry", THREADS, GDN_ADVANCE, SHARED_BYTES),
        advance_segments=launches("bcg_gdn_advance_segments", THREADS, GDN_ADVANCE, SHARED_BYTES),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
    )


@dataclasses.dataclass(frozen=True)
class Call(triton.Call):
    """triton.Call with the launches that csrc has a kernel for."""

    scratch: Scratch

    @property
    def can_prepare(self) -> bool:
        rows, kind = self.mixed_qkv, self.mixed_qkv.dtype
        read_whole = [rows, self.conv_weights, *([] if self.bias is None else [self.bias])]
        return (
            has_its_sizes(self.shape, self.tables)
            and self.shape.width == WIDTH
            and rows.stride(0) * rows.element_size() % PIECE == 0
            and all(each.data_ptr() % PIECE == 0 for each in read_whole)
            and all(each.dtype == kind for each in (*read_whole, self.a, self.b))
            and self.A_log.dtype in (kind, torch.float32)
            and self.dt_bias.dtype in (kind, torch.float32)
        )

    def prepare(self, span: int) -> None:
        if not self.can_prepare:
            active.leave_to_triton(KERNEL.op, f"prepare of {self.shape}")
            super().prepare(span)
            return
        scratch, tables, shape = self.scratch, self.tables, self.shape
        kernels = on_device(self.output.get_device())
        first_token, last_token = self.tokens(span)
        flags = self.tracking * TRACKING
        flags += (self.A_log.dtype == torch.float32) * FLOAT_A_LOG
        flags += (self.dt_bias.dtype == torch.float32) * FLOAT_DT_BIAS
        kernels.prepare[self.output.dtype](
            BLOCKS_OF_MULTIPROCESSOR * kernels.multiprocessors,
            self.mixed_qkv.data_ptr(),
            self.a.data_ptr(),
            self.b.data_ptr(),
            self.conv_weights.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            self.A_log.data_ptr(),
            self.dt_bias.data_ptr(),
            self.conv.data_ptr(),
            scratch.queries.data_ptr(),
            scratch.keys.data_ptr(),
            scratch.inverses.data_ptr(),
            scratch.scores.data_ptr(),
            scratch.decays.data_ptr(),
            self.output.data_ptr(),
            tables.chunks.data_ptr(),
            tables.counts.data_ptr(),
            tables.bounds.data_ptr(),
            *self.conv.stride(),
            span,
            first_token,
            self.mixed_qkv.stride(0),
            self.a.stride(0),
            self.b.stride(0),
            self.output.shape[0],
            last_token,
            scratch.scores.shape[1],
            scratch.decays.shape[0],
            shape.key_heads,
            shape.value_heads,
            flags,
        )

    @property
    def segment(self) -> int:
        """Tokens of a segment; 0 if no sequence of this output can be long enough to be cut."""
        segment = segment_of(self.shape, self.tables, self.output.dtype)
        return segment if self.output.shape[0] > (LEAST_SEGMENTS - 1) * segment else 0

    def advance(self, span: int) -> None:
        # read and written by twos
        is_paired = self.state.stride(0) % 2 == 0 and self.state.data_ptr() % PAIR == 0
        if self.state.dtype != torch.float32 or not is_paired or not has_its_sizes(self.shape, self.tables):
            states = f"states in {self.state.dtype} with the strides {self.state.stride()}"
            active.leave_to_triton(KERNEL.op, f"advance of {self.shape}, {states}")
            super().advance(span)
            return
        scratch, tables, shape, segment = self.scratch, self.tables, self.shape, self.segment
        kernels = on_device(self.output.get_device())
        first_token, last_token = self.tokens(span)
        parameters = (
            kernels.multiprocessors,
            scratch.queries.data_ptr(),
            scratch.keys.data_ptr(),
            scratch.inverses.data_ptr(),
            scratch.scores.data_ptr(),
            scratch.decays.data_ptr(),
            self.output.data_ptr(),
            self.state.data_ptr(),
            scratch.carries.data_ptr(),
            tables.sequences.data_ptr(),
            tables.counts.data_ptr(),
            tables.bounds.data_ptr(),
            self.state.stride(0),
            span,
            first_token,
            self.output.shape[0],
            last_token,
            scratch.scores.shape[1],
            shape.key_heads,
            shape.value_heads,
            self.tracking,
            segment,
        )
        launches = (kernels.carry, kernels.advance_segments) if segment else (kernels.advance,)
        for launch in launches:
            launch[self.output.dtype](*parameters)


def extend(
    mixed_qkv: Any, a: Any, b: Any, *, tracking: bool = False, tuning: Tuning | None = None, **others: Any
) -> None:
    """Run two launches per span of tokens, or three for an output in which a sequence may be cut.

    Call lists the other parameters, the package the contract.
    """
    Call(mixed_qkv, a, b, tracking=tracking, tuning=tuning or Tuning(), **others).launch()
