# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter runs the programs of a launch one after another; this runs them side by side.

Nearly all of the interpreter's time is spent in Python, once for each operation of each program. Here an operation is
done once, for all programs: a value that differs between them is an array with one more axis, the lanes.

The result is that of one program after another, bit for bit, or it is thrown away:

- Programs that would take different branches or numbers of turns are parted there: what they wrote is taken back, and
  each part begins anew.
- Every read and every write is remembered. Where a program has touched what another one writes, the order matters:
  everything is taken back, and the programs run one after another.
- So they do where an operation is not known here (atomic ones, for instance), or anything raises.
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

TensorHandle = interpreter.TensorHandle

# lanes at a time, and values in them, beyond which the processor's cache is left, which costs more than it gains
LANES_AT_ONCE, VALUES_AT_ONCE = 64, 1 << 17
# programs that are worth it
FEWEST = 3
# bytes of addresses that are remembered of a launch
REMEMBERED = 1 << 28
# what numpy does value by value
ELEMENTWISE = (
    *("binary_op", "ternary_op", "unary_op", "cast_impl", "create_in_numpy"),
    *("create_idiv", "create_ashr", "create_umulhi", "create_fma", "create_fabs", "create_erf", "create_rsqrt"),
    *("create_fp_to_fp", "create_bitcast", "create_int_to_ptr", "create_ptr_to_int", "create_addptr"),
)
# of every lane, or of no particular one
ALL = -1
# whoever has written what nobody has
NOBODY = -2
# from the first to the last that a launch may write, of a piece of memory
MOST_BYTES = 1 << 24

# launches of a kernel that gained nothing, less those that did: capturing a made-up batch, for instance, has all its
# requests in one slot, and says nothing of the next launch
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
MOST_FAILURES = 3
enabled = True


# traces.py replaces these two
def prepared(kernel: Callable[..., None], arguments: dict[str, Any]) -> Callable[[], None]:
    """Return what runs the kernel for the programs that the builder is at."""
    return lambda: kernel(**arguments)


def observed(kind: str, values: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """Find what the kernel's Python sees of some values."""
    return find()


class ApartError(BaseException):
    """These programs have to run one after another; no error, so that Triton does not take it for a kernel's."""


class PartedError(BaseException):
    """Lanes differ in a value that decides how they go on: one of each lane."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Lanes:
    """A `TensorHandle` of several programs; who knows nothing of lanes asks for `data`, and stops the attempt."""

    def __init__(self, lanes: np.ndarray, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.lanes, self.dtype, self.attr = lanes, dtype, attr or {}

    @property
    def data(self) -> NoReturn:
        raise ApartError

    def __bool__(self) -> NoReturn:
        raise ApartError

    get_element_ty = TensorHandle.get_element_ty
    set_attr = TensorHandle.set_attr

    def clone(self) -> Lanes:
        return Lanes(self.lanes, self.dtype)


HANDLES = (Lanes, TensorHandle)


def array(value: Any, rank: int) -> np.ndarray:
    """Values of a handle for an operation on this many axes behind that of the lanes."""
    if type(value) is not Lanes:
        plain: np.ndarray = value.data
        return plain
    lanes = value.lanes
    missing = rank + 1 - lanes.ndim
    return lanes.reshape(lanes.shape[0], *(1,) * missing, *lanes.shape[1:]) if missing > 0 else lanes


def rank_of(value: Any) -> int:
    return value.lanes.ndim - 1 if type(value) is Lanes else value.data.ndim


def has_lanes(*values: Any) -> bool:
    # not `any`, whose generator takes longer than the rest
    for value in values:  # noqa: SIM110
        if type(value) is Lanes:
            return True
    return False


def broadcast(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    # numpy's own takes as long where there is nothing to do
    return values if values.shape == shape else np.broadcast_to(values, shape)


def sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(size.value if isinstance(size, tl.constexpr) else size) for size in shape)


class Access(NamedTuple):
    """Addresses and a mask of the same shape, both with an axis of lanes, or the lane that all of it belongs to."""

    addresses: np.ndarray
    mask: np.ndarray
    lanes: np.ndarray | int
    size: int

    def flat(self, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """Each address with its lane, in pieces of this size."""
        lanes = np.broadcast_to(
            self.lanes if isinstance(self.lanes, int) else self.lanes.reshape(-1, *(1,) * (self.addresses.ndim - 1)),
            self.addresses.shape,
        )
        addresses, lanes = self.addresses[self.mask], lanes[self.mask]
        if self.size == unit:
            return addresses, lanes
        pieces = np.arange(0, self.size, unit, dtype=np.uint64)
        return (addresses[:, None] + pieces).ravel(), np.repeat(lanes, len(pieces))


class Memory:
    """All that a launch has read and written so far."""

    def __init__(self) -> None:
        self.read: list[Access] = []
        self.written: list[Access] = []
        # what stood there before each write
        self.before: list[np.ndarray] = []
        self.remembered = 0

    def remember(self, accesses: list[Access], access: Access) -> None:
        self.remembered += access.addresses.nbytes
        if self.remembered > REMEMBERED:
            raise ApartError
        accesses.append(access)

    def mark(self) -> tuple[int, int]:
        return len(self.read), len(self.written)

    def undo(self, mark: tuple[int, int] = (0, 0)) -> None:
        read, written = mark
        for access, values in zip(reversed(self.written[written:]), reversed(self.before[written:]), strict=True):
            interpreter._interpreter.store(access.addresses, values, access.mask)
        del self.read[read:], self.written[written:], self.before[written:]

    def has_order(self) -> bool:
        """Tell whether a program has touched what another one has written."""
        if not self.written:
            return False
        return any(place.has_order(self.read) for place in places(self.written))


class Place:
    """A piece of memory, from the first byte to the last, that a launch has written to."""

    def __init__(self, first: int, last: int, writes: list[Access]) -> None:
        self.first, self.last, self.writes = first, last, writes

    def has_order(self, reads: Iterable[Access]) -> bool:
        """Tell whether a lane has touched here what another one has written."""
        read = [here for access in reads if (here := self.part_here(access))]
        # words, or halves of them where somebody has touched half a word
        unit = min(access.size for access in (*read, *self.writes))
        writes = [self.units(access, unit) for access in self.writes]
        writers = np.full((self.last - self.first) // unit + 1, NOBODY, dtype=np.int32)
        for units, lanes in writes:
            writers[units] = lanes
        # where several have written, one of them is not the last
        if any(self.differ(writers[units], lanes) for units, lanes in writes):
            return True
        return any(self.differ(writers[units], lanes) for units, lanes in (self.units(access, unit) for access in read))

    def part_here(self, access: Access) -> Access | None:
        here = (access.addresses <= self.last) & (access.addresses + (access.size - 1) >= self.first) & access.mask
        return access._replace(mask=here) if here.any() else None

    def units(self, access: Access, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """Number the units that were touched, and name who touched each."""
        addresses, lanes = access.flat(unit)
        # what begins before this place, or ends behind it
        within = (addresses >= self.first) & (addresses <= self.last)
        if not within.all():
            addresses, lanes = addresses[within], lanes[within]
        offsets = addresses - np.uint64(self.first)
        if unit > 1 and (offsets & np.uint64(unit - 1)).any():
            # a word that lies across two others
            raise ApartError
        return offsets >> np.uint64(unit.bit_length() - 1), lanes

    @staticmethod
    def differ(writers: np.ndarray, lanes: np.ndarray) -> bool:
        return bool(((writers != lanes) & (writers != NOBODY)).any())


def places(written: list[Access]) -> Iterable[Place]:
    """Part memory into pieces that no write reaches out of."""
    bounds = []
    for access in written:
        addresses = access.addresses if access.mask.all() else access.addresses[access.mask]
        if addresses.size:
            bounds.append((int(addresses.min()), int(addresses.max()) + access.size - 1, access))
    bounds.sort(key=lambda bound: bound[:2])
    while bounds:
        first, last, access = bounds.pop(0)
        writes = [access]
        while bounds and bounds[0][0] <= last:
            _, further, access = bounds.pop(0)
            last, writes = max(last, further), [*writes, access]
        if last - first > MOST_BYTES:
            raise ApartError
        yield Place(first, last, writes)


class Launch:
    """The programs of one launch, those that run side by side now, and what the memory was."""

    def __init__(self, programs: np.ndarray) -> None:
        self.programs = programs
        # numbers of the programs that run now
        self.lanes = np.arange(0)
        self.attempts = 0
        self.memory = Memory()

    def part_large(self, values: int) -> None:
        """Have fewer lanes at a time where a block has so many values."""
        fewer = max(1, len(self.lanes) * VALUES_AT_ONCE // values)
        if fewer < len(self.lanes):
            raise PartedError(np.arange(len(self.lanes)) // fewer)

    def of_lane(self) -> np.ndarray | int:
        """Name the lane of an access that all lanes make alike."""
        return int(self.lanes[0]) if len(self.lanes) == 1 else ALL

    def run(self, builder: Any, run: Callable[[], None]) -> None:
        """Run all of them, parted where they have to; raises ApartError where that does not do."""
        number = len(self.programs)
        parts = [np.arange(first, min(first + LANES_AT_ONCE, number)) for first in range(0, number, LANES_AT_ONCE)]
        while parts:
            self.lanes, mark = parts.pop(0), self.memory.mark()
            self.attempts += 1
            builder.set_grid_idx(*map(int, self.programs[self.lanes[0]]))
            try:
                run()
            except PartedError as parted:
                self.memory.undo(mark)
                parts[:0] = [self.lanes[parted.values == value] for value in np.unique(parted.values)]
        if self.memory.has_order():
            raise ApartError


class Builder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """Triton's own, which has every operation done for all lanes where one of its operands has lanes."""

    launch: Launch | None = None
    # a launch that has set its grid and not run yet
    is_new = False

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        super().set_grid_dim(nx, ny, nz)
        self.is_new = True

    def run(self, kernel: Callable[..., None], arguments: dict[str, Any]) -> None:
        """Run every program when the first one is asked for."""
        if not self.is_new:
            return
        self.is_new = False
        programs = np.indices(self.grid_dim).reshape(3, -1).T
        run = prepared(kernel, arguments)
        may_run_together = enabled and len(programs) >= FEWEST and not self.options.sanitize_overflow
        may_run_together &= _failures.get(kernel, 0) < MOST_FAILURES
        if may_run_together and self.run_together(kernel, run, programs):
            return
        for program in programs.tolist():
            self.set_grid_idx(*program)
            run()

    def run_together(self, kernel: Callable[..., None], run: Callable[[], None], programs: np.ndarray) -> bool:
        """Run them side by side, or leave the memory as it was."""
        launch = self.launch = Launch(programs)
        has_failed = True
        try:
            launch.run(self, run)
            # more attempts gain nothing: each program goes a way of its own
            has_failed = 2 * launch.attempts > len(programs)
            return True
        except (ApartError, Exception):
            # an error is raised again where one program after another comes to it
            launch.memory.undo()
            return False
        finally:
            self.launch = None
            _failures[kernel] = max(0, _failures.get(kernel, 0) + (1 if has_failed else -1))

    def create_get_program_id(self, axis: int) -> Any:
        if self.launch is None:
            return super().create_get_program_id(axis)
        numbers = self.launch.programs[self.launch.lanes, axis]
        if (numbers == numbers[0]).all():
            return TensorHandle(np.array([numbers[0]], dtype=np.int32), tl.int32)
        return Lanes(numbers[:, None].astype(np.int32), tl.int32)

    def create_turn(self, first: Any, further: int) -> Any:
        """Make the number of a later turn, where lanes begin in different places."""
        return Lanes((first.lanes.reshape(-1).astype(np.int64) + further)[:, None].astype(np.int32), tl.int32)

    def create_in_numpy(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Do something in float32 for which the builder has no operation."""
        values = function(*(operand.data.astype(np.float32) for operand in operands))
        return TensorHandle(values.astype(operands[0].data.dtype), operands[0].dtype)

    def create_load(self, ptr: Any, *how: Any) -> Any:
        if not has_lanes(ptr):
            return super().create_load(ptr, *how)
        return self.create_masked_load(ptr, Lanes(np.ones(ptr.lanes.shape, bool), tl.int1), None, *how)

    def create_store(self, ptr: Any, value: Any, *how: Any) -> None:
        if not has_lanes(ptr):
            super().create_store(ptr, value, *how)
            return
        self.create_masked_store(ptr, value, Lanes(np.ones(ptr.lanes.shape, bool), tl.int1), *how)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *how: Any) -> Any:
        launch = self.launch
        if launch is None:
            return super().create_masked_load(ptrs, mask, other, *how)
        size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        if not has_lanes(ptrs, mask, other):
            read = Access(ptrs.data, is_set(mask, ptrs.data.shape), launch.of_lane(), size)
            launch.memory.remember(launch.memory.read, read)
            return super().create_masked_load(ptrs, mask, other, *how)
        addresses, masks, others = together(launch, ptrs, mask, other)
        launch.part_large(addresses.size)
        launch.memory.remember(launch.memory.read, Access(addresses, masks, launch.lanes, size))
        if others is not None:
            others = plain_handle(others, other.dtype)
        found = super().create_masked_load(
            plain_handle(addresses, ptrs.dtype), plain_handle(masks, tl.int1), others, *how
        )
        return Lanes(found.data, found.dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *how: Any) -> None:
        launch = self.launch
        if launch is None:
            super().create_masked_store(ptrs, value, mask, *how)
            return
        if len(launch.lanes) == 1:
            addresses, masks, values = ptrs.data, is_set(mask, ptrs.data.shape), value.data
        else:
            if not has_lanes(ptrs):
                raise ApartError
            addresses, masks, values = together(launch, ptrs, mask, value)
            launch.part_large(addresses.size)
        places = plain_handle(addresses, ptrs.dtype)
        written = Access(addresses, masks, launch.lanes if has_lanes(ptrs) else launch.of_lane(), values.itemsize)
        kept = tl.dtype(KEPT_AS[values.itemsize])
        before = super().create_masked_load(
            plain_handle(addresses, tl.pointer_type(kept)), plain_handle(masks, tl.int1), None, None, None, False
        )
        launch.memory.remember(launch.memory.written, written)
        launch.memory.before.append(before.data)
        super().create_masked_store(places, plain_handle(values, value.dtype), plain_handle(masks, tl.int1), *how)

    def create_atomic_cas(self, *operands: Any) -> Any:
        self._only_one_program()
        return super().create_atomic_cas(*operands)

    def create_atomic_rmw(self, *operands: Any) -> Any:
        self._only_one_program()
        return super().create_atomic_rmw(*operands)

    def _only_one_program(self) -> None:
        if self.launch is not None:
            raise ApartError

    def create_reshape(self, arg: Any, shape: Any, allow_reorder: bool) -> Any:
        if not has_lanes(arg):
            return super().create_reshape(arg, shape, allow_reorder)
        return Lanes(arg.lanes.reshape(len(arg.lanes), *sizes(shape)), arg.dtype.scalar)

    def create_trans(self, arg: Any, perm: Sequence[int]) -> Any:
        if not has_lanes(arg):
            return super().create_trans(arg, perm)
        return Lanes(np.transpose(arg.lanes, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        if not has_lanes(arg):
            return super().create_expand_dims(arg, axis)
        return Lanes(np.expand_dims(arg.lanes, axis + 1 if axis >= 0 else axis), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Any) -> Any:
        if not has_lanes(arg):
            return super().create_broadcast(arg, shape)
        wanted = sizes(shape)
        return Lanes(broadcast(array(arg, len(wanted)), (len(arg.lanes), *wanted)), arg.dtype.scalar)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        if not has_lanes(arg):
            return super().create_splat(ret_ty, arg)
        return self.create_broadcast(Lanes(arg.lanes.reshape(-1, 1), arg.dtype), ret_ty.shape)

    def create_unsplat(self, arg: Any) -> Any:
        if not has_lanes(arg):
            return super().create_unsplat(arg)
        return Lanes(arg.lanes.reshape(len(arg.lanes), -1)[:, :1], arg.dtype.scalar)

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        if not has_lanes(lhs, rhs):
            return super().create_cat(lhs, rhs)
        return Lanes(np.concatenate(self._whole(lhs, rhs), axis=1), lhs.dtype.scalar)

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        if not has_lanes(lhs, rhs):
            return super().create_join(lhs, rhs)
        return Lanes(np.stack(self._whole(lhs, rhs), axis=-1), lhs.dtype.scalar)

    def _whole(self, *values: Any) -> list[np.ndarray]:
        """Arrays with an axis of lanes each."""
        assert self.launch is not None
        lanes = len(self.launch.lanes)
        return [
            value.lanes if type(value) is Lanes else broadcast(value.data, (lanes, *value.data.shape))
            for value in values
        ]

    def create_split(self, val: Any) -> Any:
        if not has_lanes(val):
            return super().create_split(val)
        return tuple(Lanes(val.lanes[..., side], val.dtype.scalar) for side in (0, 1))

    def create_gather(self, src: Any, indices: Any, axis: int) -> Any:
        if not has_lanes(src, indices):
            return super().create_gather(src, indices, axis)
        values, places = self._whole(src, indices)
        found = np.take_along_axis(values, places, axis + 1 if axis >= 0 else axis)
        return Lanes(found, src.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if not has_lanes(a, b, d):
            return super().create_dot(a, b, d, *how)
        rank = max(map(rank_of, (a, b, d)))
        found = super().create_dot(*(TensorHandle(array(value, rank), value.dtype) for value in (a, b, d)), *how)
        return Lanes(found.data, found.dtype)

    def create_advance(self, ptr: Any, offsets: Sequence[Any]) -> Any:
        if not has_lanes(*ptr.offsets, *offsets):
            return super().create_advance(ptr, offsets)
        moved = [self.create_add(each, offset) for each, offset in zip(ptr.offsets, offsets, strict=True)]
        return interpreter.BlockPointerHandle(ptr.base, ptr.shape, ptr.strides, moved, ptr.block_shape, ptr.order)

    def create_tensor_pointer_load(self, ptr: Any, boundary_check: Any, padding: Any, *how: Any) -> Any:
        if not is_wide(ptr):
            return super().create_tensor_pointer_load(ptr, boundary_check, padding, *how)
        if padding not in (None, interpreter._ir.PADDING_OPTION.PAD_ZERO):
            raise ApartError
        return self.create_masked_load(*pointers(ptr, boundary_check), None, *how)

    def create_tensor_pointer_store(self, ptr: Any, value: Any, boundary_check: Any, *how: Any) -> None:
        if not is_wide(ptr):
            super().create_tensor_pointer_store(ptr, value, boundary_check, *how)
            return
        places, mask = pointers(ptr, boundary_check)
        self.create_masked_store(places, value, mask, *how)


# integers that keep any value of so many bytes
KEPT_AS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def is_set(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Read a mask that may be a plain array, or have integers for truth values."""
    values = mask if isinstance(mask, np.ndarray) else mask.data
    return broadcast(values, shape).astype(bool, copy=False)


def together(launch: Launch, ptrs: Any, mask: Any, value: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Addresses, mask and values of all lanes, in one shape."""
    if isinstance(mask, np.ndarray):
        mask = TensorHandle(mask, tl.int1)
    handles = [each for each in (ptrs, mask, value) if each is not None]
    rank = max(map(rank_of, handles))
    arrays = [array(each, rank) for each in handles]
    shape = np.broadcast_shapes((len(launch.lanes), *(1,) * rank), *(each.shape for each in arrays))
    addresses, masks, *values = (broadcast(each, shape) for each in arrays)
    return addresses, masks.astype(bool, copy=False), values[0] if values else None


def is_wide(ptr: Any) -> bool:
    return has_lanes(ptr.base, *ptr.shape, *ptr.strides, *ptr.offsets)


def pointers(ptr: Any, boundary_check: Any) -> tuple[Any, Any]:
    """Addresses of a block pointer's block in each lane, and which of them are inside."""
    block = sizes(ptr.block_shape)
    rank = len(block)
    size = max(1, ptr.base.get_element_ty().primitive_bitwidth // 8)
    places, mask = array(ptr.base, rank), np.ones((1,) * rank, dtype=bool)
    for axis, length in enumerate(block):
        along = [1] * rank
        along[axis] = length
        offset = array(ptr.offsets[axis], rank) + np.arange(length).reshape(along)
        places = places + (size * offset * array(ptr.strides[axis], rank)).astype(np.uint64)
        if axis in boundary_check:
            mask = mask & (offset < array(ptr.shape[axis], rank)) & (offset >= 0)
    lanes = next(len(each.lanes) for each in (ptr.base, *ptr.shape, *ptr.strides, *ptr.offsets) if type(each) is Lanes)
    whole = (lanes, *block)
    return Lanes(broadcast(places, whole), ptr.base.dtype.scalar), Lanes(broadcast(mask, whole), tl.int1)


def plain_handle(values: np.ndarray, dtype: Any) -> Any:
    """Make a handle without the checks of its size, which take longer than most operations."""
    made = TensorHandle.__new__(TensorHandle)
    made.data, made.dtype, made.attr = values, dtype, {}
    return made


def elementwise(name: str) -> Callable[..., Any]:
    """Have an operation on plain arrays done on those of all lanes."""
    own = vars(Builder).get(name)

    def call(self: Any, *operands: Any) -> Any:
        # looked up each time: some are replaced when the interpreter is installed, behind the import of this
        operate = own or getattr(interpreter.InterpreterBuilder, name)
        if not has_lanes(*operands):
            return operate(self, *operands)
        rank = max([rank_of(each) for each in operands if type(each) in HANDLES])
        plain = [plain_handle(array(each, rank), each.dtype) if type(each) in HANDLES else each for each in operands]
        made = operate(self, *plain)
        return Lanes(made.data, made.dtype)

    return call


for _name in ELEMENTWISE:
    setattr(Builder, _name, elementwise(_name))


def same(values: np.ndarray) -> Any:
    """Return the one value that all lanes have, and part them where they have several."""
    if (values == values[0]).all():
        return values[0].item()
    raise PartedError(values)


def truth_of(lanes: np.ndarray) -> bool:
    # as Triton has it, where a block is true
    return lanes[0].size != 1 or bool(same(lanes.reshape(-1).astype(bool)))


def is_of_lanes(value: Any) -> bool:
    return isinstance(value, tl.tensor) and type(value.handle) is Lanes


def range_of_lanes(first: Any, end: Any = None, step: Any = 1) -> Iterable[Any]:
    """Python's range, or where lanes begin in different places, as many turns as each of them takes."""
    first, end = (0, first) if end is None else (first, end)
    first, end = (value if isinstance(value, tl.tensor) else int(value) for value in (first, end))
    step = int(step)
    if not step:
        raise ValueError("range() arg 3 must not be zero")

    def found() -> tuple[int | None, int]:
        return turns_of(of_python(first), of_python(end), step)

    begin, number = observed("turns", (first, end, step), found)
    if begin is not None:
        return range(begin, begin + number * step, step)
    turn_of = interpreter.interpreter_builder.create_turn
    return (tl.core.tensor(turn_of(first.handle, turn * step), tl.int32) for turn in range(number))


def of_python(value: Any) -> Any:
    if not isinstance(value, tl.tensor):
        return value
    return value.handle.lanes if type(value.handle) is Lanes else value.handle.data


def turns_of(first: Any, end: Any, step: int) -> tuple[int | None, int]:
    """Tell where all lanes begin, if that is one place, and how many turns each of them takes."""
    begin, last = (np.asarray(value).reshape(-1).astype(np.int64) for value in (first, end))
    number = int(same(np.maximum(0, -((begin - last) // step))))
    return (int(begin[0]) if len(begin) == 1 else None), number


def lesser_of_lanes(*values: Any) -> Any:
    return chosen_in_lanes(min, "less_than", values)


def greater_of_lanes(*values: Any) -> Any:
    return chosen_in_lanes(max, "greater_than", values)


def chosen_in_lanes(of_python: Callable[..., Any], comparison: str, values: tuple[Any, ...]) -> Any:
    """Choose as Python does, but in each lane for itself, where both are integers of one type."""
    semantic = interpreter.interpreter_semantic
    if len(values) == 2 and any(map(is_of_lanes, values)):
        first, second = map(semantic.to_tensor, values)
        if first.type == second.type == tl.int32:
            return semantic.where(getattr(semantic, comparison)(second, first), second, first)
    return of_python(*values)


IN_PLACE_OF_PYTHONS = {"range": range_of_lanes, "min": lesser_of_lanes, "max": greater_of_lanes}


class _Renaming(ast.NodeTransformer):
    """A kernel's calls of what Python has, as calls of what knows lanes."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            node.func.id = IN_PLACE_OF_PYTHONS[node.func.id].__name__
        return node


def _patch_calls_of_python() -> None:
    transform, patch_core = interpreter.FunctionRewriter._transform_ast, interpreter._patch_lang_core
    for function in IN_PLACE_OF_PYTHONS.values():
        # a rewritten kernel finds what is there
        setattr(interpreter, function.__name__, function)

    def transform_calls(self: Any, text: str) -> Any:
        # Triton's library has a `max` of its own
        names = IN_PLACE_OF_PYTHONS.keys() - self.fn.__globals__.keys()
        return _Renaming(names).visit(transform(self, text))

    interpreter.FunctionRewriter._transform_ast = transform_calls

    def new_range(first: Any, end: Any = None, step: Any = None, **_: Any) -> Iterable[Any]:
        step = 1 if step is None else step
        return range_of_lanes(0, first, step) if end is None else range_of_lanes(first, end, step)

    def patch_core_and_range(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        scope.set_attr(lang, "range", new_range)

    interpreter._patch_lang_core = patch_core_and_range


def _patch_tensor() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_lanes(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        as_bool, as_index, transposed = tensor.__bool__, tensor.__index__, tensor.T.fget

        def is_true(self: Any) -> bool:
            if type(self.handle) is not Lanes:
                return bool(observed("truth", (self,), lambda: as_bool(self)))
            return bool(observed("truth", (self,), lambda: truth_of(self.handle.lanes)))

        def index(self: Any) -> int:
            if type(self.handle) is not Lanes:
                return int(observed("number", (self,), lambda: as_index(self)))
            return int(observed("number", (self,), lambda: same(self.handle.lanes.reshape(-1))))

        def turned(self: Any) -> Any:
            *before, rows, columns = self.type.shape
            if before:
                # for lanes, this raises ApartError
                return transposed(self)
            handle = interpreter.interpreter_builder.create_trans(self.handle, [1, 0])
            return tl.core.tensor(handle, tl.block_type(self.dtype, [columns, rows]))

        tensor.__bool__, tensor.__index__, tensor.T = is_true, index, property(turned)

    interpreter._patch_lang_tensor = patch_tensor_with_lanes


def _patch_reductions() -> None:
    reductions: dict[Any, Callable[..., np.ndarray]] = {
        tl.standard._elementwise_max: np.nanmax,
        tl.standard._elementwise_min: np.nanmin,
        tl.standard._sum_combine: np.sum,
    }
    places: dict[Any, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
        tl.standard._argmax_combine_tie_break_left: (np.max, np.argmax),
        tl.standard._argmin_combine_tie_break_left: (np.min, np.argmin),
    }
    scans: dict[Any, Callable[..., np.ndarray]] = {
        tl.standard._sum_combine: np.cumsum,
        tl.standard._prod_combine: np.cumprod,
    }
    reduce, scan = interpreter.ReduceOps.apply_impl, interpreter.ScanOps.apply_impl

    def reduced(self: Any, inputs: tuple[Any, ...]) -> Any:
        if not has_lanes(*(each.handle for each in inputs)):
            return reduce(self, inputs)
        value = inputs[0]
        lanes = value.handle.lanes
        if self.axis is None:
            lanes = lanes.reshape(len(lanes), -1)
        axis = 1 if self.axis is None else self.axis + 1 if self.axis >= 0 else self.axis
        if self.axis is None and self.keep_dims:
            raise ApartError
        if self.combine_fn in places:
            of_value, of_index = places[self.combine_fn]
            return (
                as_tensor(of_value(lanes, axis=axis, keepdims=self.keep_dims), value.dtype),
                as_tensor(of_index(lanes, axis=axis, keepdims=self.keep_dims), tl.int32),
            )
        if self.combine_fn not in reductions:
            raise ApartError
        return as_tensor(reductions[self.combine_fn](lanes, axis=axis, keepdims=self.keep_dims), value.dtype)

    def scanned(self: Any, inputs: tuple[Any, ...]) -> Any:
        if not has_lanes(*(each.handle for each in inputs)):
            return scan(self, inputs)
        if self.combine_fn not in scans:
            raise ApartError
        value, axis = inputs[0], self.axis + 1 if self.axis >= 0 else self.axis
        lanes = np.flip(value.handle.lanes, axis=axis) if self.reverse else value.handle.lanes
        made = scans[self.combine_fn](lanes, axis=axis)
        return [as_tensor(np.flip(made, axis=axis) if self.reverse else made, value.dtype)]

    def as_tensor(lanes: np.ndarray, dtype: Any) -> Any:
        values = lanes.astype(interpreter._get_np_dtype(dtype))
        if values.ndim == 1:
            return tl.core.tensor(Lanes(values[:, None], dtype.scalar), dtype)
        return tl.core.tensor(Lanes(values, dtype.scalar), tl.block_type(dtype, list(values.shape[1:])))

    interpreter.ReduceOps.apply_impl, interpreter.ScanOps.apply_impl = reduced, scanned


def _search_kernels_themselves() -> None:
    patch_lang = interpreter._patch_lang
    # it searches what the function names
    interpreter._patch_lang = lambda fn: patch_lang(inspect.unwrap(fn))


def install() -> None:
    """Call when all else of the interpreter is patched."""
    interpreter.interpreter_builder.__class__ = Builder
    _patch_calls_of_python()
    _patch_tensor()
    _patch_reductions()
    _search_kernels_themselves()
