# SPDX-License-Identifier: Apache-2.0
"""Make Triton's interpreter (TRITON_INTERPRET=1) run SGLang's kernels; tried with 3.6.0 and 3.7.1."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda, libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from . import launches, side_by_side, traces

TensorHandle = interpreter.TensorHandle

LIBDEVICE_IN_NUMPY: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "fast_log2f": np.log2,
    "fast_logf": np.log,
    "log": np.log,
    "log1p": np.log1p,
    "rint": np.rint,
    "round": np.round,
    "tanh": np.tanh,
}

# an operation on two numbers of one of these types is one of that type, whatever it is
FLOATS, INTEGERS = {"fp32", "fp64"}, {"int32", "int64"}
CLOSED_TYPES = FLOATS | INTEGERS
ELEMENT_TYPES = (tl.dtype, tl.pointer_type)

# bytes of an element that numpy has a type for
SIZES = {1, 2, 4, 8}
FEW_VALUES = 1000

_installed = False


def _autotune_takes_the_first_config() -> None:
    # no driver to benchmark with
    run = Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = run_first


def _as_float(handle: Any) -> Any:
    """Convert bfloat16, which the interpreter keeps as bits in uint16."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _to_bfloat16_bits(values: Any) -> Any:
    """Round to nearest even with torch, as hardware does; the interpreter truncates."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def _bfloat16_is_a_number() -> None:
    # the interpreter multiplies and casts bfloat16 bits as if they were integers
    builder = interpreter.InterpreterBuilder
    create_dot, cast_impl = builder.create_dot, builder.cast_impl

    def create_dot_of_numbers(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return create_dot(self, a, b, d, *precision)
        product = np.matmul(_as_float(a).astype(np.float32), _as_float(b).astype(np.float32))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_numbers(self: Any, source: Any, target_type: Any) -> Any:
        source_scalar, target_scalar = source.dtype.scalar, target_type.scalar
        if source_scalar == target_scalar or tl.bfloat16 not in (source_scalar, target_scalar):
            return cast_impl(self, source, target_type)
        if target_scalar == tl.bfloat16:
            return TensorHandle(_to_bfloat16_bits(source.data), target_scalar)
        return TensorHandle(_as_float(source).astype(interpreter._get_np_dtype(target_type)), target_scalar)

    builder.create_dot = create_dot_of_numbers
    builder.cast_impl = cast_numbers


def _aliases_of_builtins_are_interpreted() -> None:
    # the interpreter patches the names in `tl`; a kernel's module that says `exp = tl.exp` keeps the unpatched one
    patch_lang = interpreter._patch_lang
    searched: weakref.WeakSet[Any] = weakref.WeakSet()
    # it stays replaced: nothing but kernels uses the language in these processes, and replacing it for each launch and
    # back took longer than most launches
    patched: set[int] = set()

    def interpreted(builtin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(builtin)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return builtin(*args, **kwargs)

        vars(call)["is_interpreted_alias"] = True
        return call

    def patch_lang_and_aliases(fn: Any) -> Any:
        if fn not in searched:
            searched.add(fn)
            for name, value in list(fn.__globals__.items()):
                if callable(value) and tl.core.is_builtin(value) and not hasattr(value, "is_interpreted_alias"):
                    fn.__globals__[name] = interpreted(value)
        languages = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not languages or not languages <= patched:
            patch_lang(fn)
            patched.update(languages)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang_and_aliases


def _a_tensor_of_one_value_is_an_index() -> None:
    # scalars are arrays of shape (1,) here, which numpy from 2.4 refuses to convert: `range(n)` in a kernel fails
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _numpy_types_are_looked_up_once() -> None:
    of_type = interpreter._get_np_dtype
    of_scalar = functools.cache(lambda name: of_type(tl.dtype(name)))

    def get_np_dtype(type_: Any) -> Any:
        scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
        return of_type(type_) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar.name)

    interpreter._get_np_dtype = get_np_dtype


def _shapes_are_made_once() -> None:
    # a kernel has few shapes, and every operation made its own three times: that was a third of all time
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    no_shape = (tl.tuple([]), tl.constexpr(1))
    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) not in ELEMENT_TYPES:
            make_type(self, element_ty, shape)
            return
        sizes = shape.values if type(shape) is tl.tuple else shape
        key = element_ty.name, tuple([size.value if type(size) is tl.constexpr else size for size in sizes])
        made = known.get(key)
        if made is None:
            make_type(self, element_ty, shape)
            self.of_tensors = (tl.tuple([tl.constexpr(size) for size in key[1]]), tl.constexpr(self.numel))
            known[key] = dict(vars(self))
        else:
            vars(self).update(made)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type_: Any) -> None:
        of_tensors = no_shape if type(type_) in ELEMENT_TYPES else vars(type_).get("of_tensors")
        if of_tensors is None:
            make_tensor(self, handle, type_)
        else:
            self.handle, self.type, self.dtype = handle, type_, type_.scalar
            self.shape, self.numel = of_tensors

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor


def _like_operands_are_not_converted() -> None:
    # most operations are on two tensors of one type and shape, and finding that out took half of their time
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    has_no_constexpr = {tl.tensor, tl.dtype, tl.block_type, bool, int, float, type(None)}

    @functools.wraps(check)
    def check_unlike(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and type(lhs) is tl.tensor and is_of_type(rhs, lhs.dtype):
            rhs = self.scalar_constant(rhs, lhs.dtype)
        elif arithmetic_check and type(rhs) is tl.tensor and is_of_type(lhs, rhs.dtype):
            lhs = self.scalar_constant(lhs, rhs.dtype)
        if type(lhs) is tl.tensor is type(rhs) and are_alike(lhs.dtype, rhs.dtype, allow_lhs_ptr):
            return broadcast_unlike(self, lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def is_of_type(number: Any, dtype: Any) -> bool:
        """True for a number of Python's that takes this type from the other operand."""
        if type(number) is int:
            return dtype.name in CLOSED_TYPES and -(2**31) <= number < 2**31
        return type(number) is float and dtype.name in FLOATS

    def are_alike(left: Any, right: Any, allow_pointer: bool) -> bool:
        if type(left) is tl.pointer_type:
            return allow_pointer and right.name in INTEGERS
        return left.name in CLOSED_TYPES and left.name == right.name

    @functools.cache
    def common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
        try:
            return np.broadcast_shapes(left, right)
        except ValueError:
            return None

    @functools.wraps(broadcast)
    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        # shapes are made once
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.shape.values:
            return lhs, splat(self, rhs, lhs.type.shape)
        if not lhs.shape.values:
            return splat(self, lhs, rhs.type.shape), rhs
        left, right = tuple(lhs.type.shape.values), tuple(rhs.type.shape.values)
        common = common_shape(left, right)
        if common is None:
            # it says what is wrong
            return broadcast(self, lhs, rhs)
        return (
            lhs if left == common else broadcast_to(self, lhs, common),
            rhs if right == common else broadcast_to(self, rhs, common),
        )

    def splat(self: Any, scalar: Any, shape: Any) -> Any:
        type_ = tl.block_type(scalar.dtype, shape)
        return self.tensor(self.builder.create_splat(type_, scalar.handle), type_)

    def broadcast_to(self: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
        return self.tensor(self.builder.create_broadcast(tensor.handle, shape), tl.block_type(tensor.dtype, [*shape]))

    def unwrap_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in has_no_constexpr else unwrap(value)

    TritonSemantic.binary_op_type_checking_impl = check_unlike
    TritonSemantic.broadcast_impl_value = broadcast_unlike
    tl.core._unwrap_if_constexpr = unwrap_constexpr
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _builtins_are_looked_up_once() -> None:
    # every launch searched all of `tl`, and every call copied its keywords twice
    is_checked_only = tl.core.builtin(lambda: None).__code__
    found: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}

    def interpreted(member: Any, semantic: Any) -> Callable[..., Any]:
        function = member.__wrapped__ if member.__code__ is is_checked_only else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in found:
            semantic = TritonSemantic(builder)
            members = [(name, value) for name, value in inspect.getmembers(package) if tl.core.is_builtin(value)]
            found[id(package)] = package, [(name, interpreted(value, semantic)) for name, value in members]
        for name, call in found[id(package)][1]:
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch_builtin


def _libdevice_in_numpy() -> None:
    def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *others: Any, **_: Any) -> Any:
            operands = [each.handle for each in (x, *others)]
            return tl.tensor(interpreter.interpreter_builder.create_in_numpy(function, *operands), x.type)

        return call

    for module in (libdevice, cuda.libdevice):
        for name, function in LIBDEVICE_IN_NUMPY.items():
            if hasattr(module, name):
                setattr(module, name, elementwise(function))


class _Addressed:
    """Memory from an address on, as numpy takes it."""

    def __init__(self, address: int, length: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (length,), "typestr": f"<u{size}", "version": 3}


def _places(addresses: Any, size: int) -> tuple[Any, Any] | None:
    """Memory from the first of these addresses to the last, and where they are in it; None if they do not align."""
    first = addresses.min()
    offsets = (addresses - first).view(np.int64)
    if size > 1:
        if (offsets & (size - 1)).any():
            return None
        offsets >>= size.bit_length() - 1
    return np.asarray(_Addressed(int(first), int(offsets.max()) + 1, size)), offsets


def _memory_in_numpy() -> None:
    # Triton's own is faster for few values only
    of_triton = interpreter._interpreter

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        size = dtype.itemsize
        if pointers.size < FEW_VALUES or other.dtype != dtype or size not in SIZES:
            return of_triton.load(*map(_writable, (pointers, mask, other)), dtype)
        chosen = np.asarray(mask).astype(bool, copy=False)
        addresses = pointers.ravel() if chosen.all() else pointers[chosen]
        if not addresses.size:
            return np.array(other, order="C")
        there = _places(addresses, size)
        if there is None:
            return of_triton.load(*map(_writable, (pointers, mask, other)), dtype)
        memory, places = there
        if places.size == pointers.size:
            return memory[places].view(dtype).reshape(pointers.shape)
        found = np.array(other, order="C")
        found.view(f"<u{size}")[chosen] = memory[places]
        return found

    def store(pointers: Any, value: Any, mask: Any) -> None:
        size = value.itemsize
        if pointers.size < FEW_VALUES or size not in SIZES:
            of_triton.store(*map(_writable, (pointers, value, mask)))
            return
        chosen = np.asarray(mask).astype(bool, copy=False)
        addresses = pointers[chosen]
        there = _places(addresses, size) if addresses.size else None
        if there:
            memory, places = there
            # of several values for a place the last one stays, as there
            memory[places] = np.ascontiguousarray(value).view(f"<u{size}")[chosen]
        elif addresses.size:
            of_triton.store(*map(_writable, (pointers, value, mask)))

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        dtype = ptrs.get_element_ty()
        of_numpy = interpreter._get_np_dtype(dtype)
        others = np.zeros(ptrs.data.shape, of_numpy) if other is None else other.data
        return side_by_side.plain_handle(load(ptrs.data, mask.data, others, of_numpy), dtype)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    interpreter._interpreter = types.SimpleNamespace(**{**vars(of_triton), "load": load, "store": store})


def _writable(values: Any) -> Any:
    """Triton's own refuses what cannot be written, even where it is read only."""
    plain = np.asarray(values)
    return plain if plain.flags.writeable else plain.copy()


def _no_grid_dependency_to_wait_for() -> None:
    # programmatic dependent launch overlaps two kernels; here the earlier one has always finished
    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(cuda, name):
            setattr(cuda, name, lambda *_, **__: None)


def install(overflow_is_an_error: bool = False) -> None:
    """Call before a module with Triton kernels is imported, and before graphs' `install`. Again it does nothing.

    Integer overflow checks are off by default: a GPU makes none, and they multiply the cost of every sum and product.
    """
    global _installed
    if _installed:
        return
    _installed = True
    assert not hasattr(interpreter.GridExecutor.__call__, "__wrapped__"), "graphs would not see the launches any more"
    _autotune_takes_the_first_config()
    _bfloat16_is_a_number()
    _aliases_of_builtins_are_interpreted()
    _a_tensor_of_one_value_is_an_index()
    _numpy_types_are_looked_up_once()
    _shapes_are_made_once()
    _like_operands_are_not_converted()
    _builtins_are_looked_up_once()
    _libdevice_in_numpy()
    _no_grid_dependency_to_wait_for()
    _memory_in_numpy()
    side_by_side.install()
    traces.install()
    launches.install()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=overflow_is_an_error)
