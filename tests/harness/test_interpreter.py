# SPDX-License-Identifier: Apache-2.0
"""The shortcuts of cpu_sglang/interpreter.py: operands become what Triton itself makes of them."""

from __future__ import annotations

import inspect
import itertools
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as of_triton
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

from cpu_sglang import interpreter

interpreter.install()


class Plain(TritonSemantic):  # type: ignore[misc]
    """Triton's own."""

    binary_op_type_checking_impl = inspect.unwrap(TritonSemantic.binary_op_type_checking_impl)
    broadcast_impl_value = inspect.unwrap(TritonSemantic.broadcast_impl_value)


OURS, TRITONS = (kind(triton_interpreter.interpreter_builder) for kind in (TritonSemantic, Plain))
TYPES = (tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (4,), (1, 4), (2, 1), (2, 4))
NUMBERS = (0, 3, -3, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 0.5, -0.0, float("inf"), True)
POINTERS = (tl.pointer_type(tl.float16), tl.pointer_type(tl.int32))


def operand(dtype: Any, shape: tuple[int, ...]) -> Any:
    numpy_type = triton_interpreter._get_np_dtype(dtype)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape or (1,)).astype(numpy_type)
    return tl.tensor(triton_interpreter.TensorHandle(values, dtype), tl.block_type(dtype, [*shape]) if shape else dtype)


OPERANDS = [*(operand(dtype, shape) for dtype in (*TYPES, *POINTERS) for shape in SHAPES), *NUMBERS]


def told(check: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Each operand's type, shape and values, or the error."""
    try:
        made = check(*arguments, **keywords)
    except Exception as error:
        return type(error), str(error)
    return [
        (
            str(one.type),
            one.shape.values,
            one.dtype.name,
            one.numel.value,
            one.handle.data.dtype,
            one.handle.data.tolist(),
        )
        for one in made
    ]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"allow_lhs_ptr": True},
        {"allow_lhs_ptr": True, "allow_rhs_ptr": True},
        {"arithmetic_check": False},
        {"div_or_mod": True},
    ],
    ids=str,
)
def test_operands_are_those_that_triton_makes(asked: dict[str, bool]) -> None:
    for left, right in itertools.product(OPERANDS, OPERANDS):
        if isinstance(left, tl.tensor) or isinstance(right, tl.tensor):
            ours, tritons = (told(each.binary_op_type_checking_impl, left, right, **asked) for each in (OURS, TRITONS))
            assert ours == tritons, f"{left} and {right}"


def test_shapes_are_those_that_triton_makes() -> None:
    tensors = [one for one in OPERANDS if isinstance(one, tl.tensor)]
    for left, right in itertools.product(tensors, tensors):
        ours, tritons = (told(each.broadcast_impl_value, left, right) for each in (OURS, TRITONS))
        assert ours == tritons, f"{left} and {right}"


def test_types_are_compared_as_before() -> None:
    assert tl.float32 == tl.dtype("fp32") and tl.float32 != tl.float64 and tl.float32 != "fp32"
    assert tl.block_type(tl.float32, [2]) == tl.block_type(tl.float32, [2]) != tl.block_type(tl.float32, [4])
    assert POINTERS[0] == tl.pointer_type(tl.float16) != POINTERS[1]


def test_a_block_of_pointers_keeps_what_it_points_to() -> None:
    made = [tl.block_type(tl.pointer_type(tl.float16, space), [2, 4]) for space in (1, 3)]
    assert [block.element_ty.address_space for block in made] == [1, 3]
    assert [str(block) for block in made] == ["<['2', '4'], pointer<fp16>>"] * 2


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "some between two elements"])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "int32", "float32", "int64", "float64"])
@pytest.mark.parametrize("chosen", ["none", "some", "all"])
def test_memory_is_read_and_written_as_by_triton(
    dtype: str, shift: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "FEW_VALUES", 0)
    random = np.random.default_rng(0)
    size, kind = np.dtype(dtype).itemsize, np.dtype(dtype)
    memory = random.integers(0, 2, 200, np.uint8) if dtype == "bool" else random.integers(0, 256, 200, np.uint8)
    places = random.integers(0, 20, (4, 8)) * size + random.integers(0, 1 + shift, (4, 8))
    mask = random.integers(*{"none": (0, 1), "some": (0, 2), "all": (1, 2)}[chosen], places.shape, np.int8).astype(bool)
    # nothing is there
    pointers = np.where(mask, memory.ctypes.data + places, 8).astype(np.uint64)
    other, value = (random.integers(0, 2, places.shape).astype(kind) for _ in range(2))
    found = []
    before = memory.copy()
    for using in (triton_interpreter._interpreter, of_triton):
        memory[:] = before
        # a place is written twice, and what is read has the shape of what it is read for
        read = using.load(pointers, mask, other, kind)
        using.store(pointers, value, mask)
        found.append((read.tobytes(), read.shape, read.dtype, memory.tobytes()))
    assert found[0] == found[1] and (found[0][3] != before.tobytes() or chosen == "none")


def test_what_cannot_be_written_is_read() -> None:
    memory, once = np.arange(4, dtype=np.float32), (1, 3)
    pointers = np.broadcast_to(np.uint64(memory.ctypes.data), once)
    mask, other = (np.broadcast_to(value, once) for value in (np.bool_(True), np.float32(0)))
    triton_interpreter._interpreter.store(pointers, np.broadcast_to(np.float32(7), once), mask)
    assert triton_interpreter._interpreter.load(pointers, mask, other, other.dtype).tolist() == [[7, 7, 7]]


def test_values_of_another_axis_order_are_written_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "FEW_VALUES", 0)
    memory = np.zeros((2, 4), np.float32)
    pointers = np.arange(8, dtype=np.uint64).reshape(4, 2).T * np.uint64(4) + np.uint64(memory.ctypes.data)
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    triton_interpreter._interpreter.store(pointers, values, np.ones((2, 4), bool))
    assert memory.ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    read = triton_interpreter._interpreter.load(pointers, np.ones((2, 4), bool), values * 0, values.dtype)
    assert read.tolist() == values.tolist()


@triton.jit  # type: ignore[untyped-decorator]
def busy(out: Any) -> None:
    for turn in range(20):
        tl.store(out + turn, tl.load(out + turn) + turn)


def page_faults_at(depth: int, out: torch.Tensor) -> int:
    if depth:
        return page_faults_at(depth - 1, out)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    busy[(1,)](out)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_of_the_stack_makes_a_launch_slow() -> None:
    out = torch.zeros(20)
    page_faults_at(0, out)
    # a piece of the stack takes a hundred of these frames or so, and is taken a thousand times where it has no room
    # twice at each, because a forked process copies each page of its parent once
    assert max(min(page_faults_at(depth, out), page_faults_at(depth, out)) for depth in range(300)) < 200
