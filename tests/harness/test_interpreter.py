# SPDX-License-Identifier: Apache-2.0
"""The shortcuts of cpu_sglang/interpreter.py: operands become what Triton itself makes of them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
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


OPERANDS = [
    *(operand(dtype, shape) for dtype in (*TYPES, *POINTERS) for shape in SHAPES),
    *NUMBERS,
]


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
