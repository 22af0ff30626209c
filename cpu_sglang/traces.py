# SPDX-License-Identifier: Apache-2.0
"""Repeat what a kernel's programs do to arrays, without Triton's language in between.

Most of the interpreter's time is spent on types, shapes and wrappers, which are the same in each launch of a kernel
with arguments of the same types. So one run is recorded: each operation of the builder, on which values, in order. The
next runs do these operations on their own values, in a function that was generated for them.

The result is that of the kernel, bit for bit:

- The operations are the interpreter's own, with the same operands in the same shapes.
- Where the kernel's Python saw a value (a branch, a range), the recorded function looks again. If it finds another one,
  what it has written is taken back, and another recording or the kernel itself runs.
- What is no operation known here is seen by the recorder, as it reads values, and nothing is kept of that run.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from . import side_by_side
from .side_by_side import Builder, Lanes, PartedError, TensorHandle

# recording and compiling take as long as several runs
RUNS_BEFORE_A_RECORDING = 2
MOST_RECORDINGS, MOST_OPERATIONS = 64, 4000

# what depends on its operands only, so that constants give a constant, and what nobody uses is left out
PURE = (
    *("binary_op", "ternary_op", "unary_op", "cast_impl", "create_in_numpy", "create_idiv", "create_umulhi"),
    *("create_fma", "create_fabs", "create_erf", "create_rsqrt", "create_fp_to_fp", "create_bitcast", "create_addptr"),
    *("create_int_to_ptr", "create_ptr_to_int", "create_reshape", "create_trans", "create_expand_dims"),
    *("create_broadcast", "create_splat", "create_unsplat", "create_cat", "create_join", "create_split"),
    *("create_gather", "create_dot", "create_make_range", "create_turn", "create_advance", "create_make_block_ptr"),
    *("get_int1", "get_int8", "get_int16", "get_int32", "get_int64", "get_uint8", "get_uint16", "get_uint32"),
    *("get_uint64", "get_fp16", "get_fp32", "get_fp64", "get_null_value", "get_all_ones_value"),
)
# what also depends on the program, or on memory
OTHERS = (
    *("create_get_program_id", "create_get_num_programs", "create_load", "create_masked_load"),
    *("create_tensor_pointer_load", "create_store", "create_masked_store", "create_tensor_pointer_store"),
    *("create_atomic_cas", "create_atomic_rmw", "create_assume", "create_assert"),
)
WRITING = (
    "create_store",
    "create_masked_store",
    "create_tensor_pointer_store",
    "create_atomic_cas",
    "create_atomic_rmw",
)
WATCHED: tuple[tuple[Any, str], ...] = ((TensorHandle, "data"), (Lanes, "lanes"))
# how a recording ends where lanes have to part, and what a guard finds where they did not
PARTED, WHOLE = "parted", "whole"

enabled = True
_recorder: Recorder | None = None


class MissedError(BaseException):
    """A value is not the recorded one: which of them, and what it is."""

    def __init__(self, place: int, found: Any) -> None:
        self.place, self.found = place, found


class Slot(NamedTuple):
    """A value of a recording: its name there, and its array where it is a constant."""

    name: str
    is_wide: bool
    rank: int
    dtype: Any
    of_numpy: Any
    constant: Any = None


class Step(NamedTuple):
    text: str
    outputs: tuple[str, ...] = ()
    is_pure: bool = False


class Trace(NamedTuple):
    run: Callable[..., None]
    outcomes: tuple[Any, ...]
    # memory cannot be taken back where programs run one after another
    may_miss_late: bool


class Known:
    """Recordings of a kernel with arguments of some types."""

    def __init__(self) -> None:
        self.runs = 0
        self.traces: list[Trace] = []
        # the one that fitted last time, by the programs that ran
        self.last: dict[Any, Trace] = {}
        self.cannot_be_recorded = False

    def fitting(self, outcomes: tuple[Any, ...], tried: list[Trace]) -> Trace | None:
        for trace in self.traces:
            if trace.outcomes[: len(outcomes)] == outcomes and not any(trace is other for other in tried):
                return trace
        return None


_known: weakref.WeakKeyDictionary[Any, dict[Any, Known]] = weakref.WeakKeyDictionary()


def prepared(kernel: Callable[..., None], arguments: dict[str, Any]) -> Callable[[], None]:
    """Return what runs the kernel for the programs that the builder is at."""

    def run() -> None:
        kernel(**arguments)

    handles: list[Any] = []
    key = tuple(key_of(value, handles) for value in arguments.values())
    try:
        by_key = _known.setdefault(kernel, {})
        hash(key)
    except TypeError:
        return run
    builder = interpreter.interpreter_builder
    inputs = [handle.data for handle in handles]

    def repeat() -> None:
        if not enabled or _recorder is not None:
            run()
            return
        launch = builder.launch
        wide: tuple[bool, ...] = ()
        place: Any = builder.grid_idx
        if launch is not None:
            numbers = launch.programs[launch.lanes]
            wide = tuple((numbers != numbers[0]).any(0).tolist())
            place = len(numbers), int(launch.lanes[0])
        known = by_key.get((key, wide))
        if known is None:
            known = by_key[key, wide] = Known()
        if repeated(known, builder, inputs, place):
            return
        known.runs += 1
        if known.runs <= RUNS_BEFORE_A_RECORDING or known.cannot_be_recorded:
            run()
            return
        record(known, run, handles, place)

    return repeat


def key_of(value: Any, handles: list[Any]) -> Any:
    """Tell arguments apart by all that the kernel's Python can see of them; collects the handles."""
    if type(value) is tl.tensor:
        handles.append(value.handle)
        return repr(value.type), value.handle.data.dtype.num
    if isinstance(value, tuple):
        return type(value), tuple(key_of(part, handles) for part in value)
    if type(value) is tl.constexpr:
        return tl.constexpr, type(value.value), value.value
    # numbers of several types are equal
    return type(value), value


def repeated(known: Known, builder: Any, inputs: list[np.ndarray], place: Any) -> bool:
    """Run one of the recordings; False, with the memory as it was, if none fits."""
    if not known.traces:
        return False
    memory = builder.launch.memory if builder.launch else None
    tried: list[Trace] = []
    trace: Trace | None = known.last.get(place, known.traces[-1])
    while trace is not None:
        if memory is None and trace.may_miss_late:
            return False
        mark = memory.mark() if memory else (0, 0)
        known.last[place] = trace
        try:
            trace.run(builder, inputs)
        except MissedError as missed:
            if memory:
                memory.undo(mark)
            tried.append(trace)
            found = () if missed.found is WHOLE else (missed.found,)
            trace = known.fitting(trace.outcomes[: missed.place] + found, tried)
        else:
            return True
    return False


def record(known: Known, run: Callable[[], None], handles: list[Any], place: Any) -> None:
    global _recorder
    recorder = _recorder = Recorder(handles)
    builder = interpreter.interpreter_builder
    builder.__class__ = Recording
    for kind, name in WATCHED:
        setattr(kind, name, Watched(name))
    try:
        run()
        recorder.is_whole = True
    except PartedError:
        recorder.is_whole = recorder.has_parted
        raise
    finally:
        for kind, name in WATCHED:
            delattr(kind, name)
        builder.__class__ = Builder
        _recorder = None
        if recorder.has_failed:
            known.cannot_be_recorded = True
        elif recorder.is_whole:
            known.last[place] = trace = recorder.compiled()
            known.traces.append(trace)
            is_of_no_use = trace.may_miss_late and builder.launch is None
            known.cannot_be_recorded = is_of_no_use or len(known.traces) == MOST_RECORDINGS
        else:
            known.cannot_be_recorded = True


class Watched:
    """Values of a handle while a run is recorded; whoever reads them outside of an operation spoils the recording."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, handle: Any, owner: Any = None) -> Any:
        if handle is None:
            raise AttributeError(self.name)
        if _recorder is not None and not _recorder.depth:
            _recorder.has_failed = True
        return vars(handle)[self.name]

    def __set__(self, handle: Any, values: Any) -> None:
        if _recorder is not None and not _recorder.depth:
            _recorder.has_failed = True
        vars(handle)[self.name] = values


class Recorder:
    """Steps of one run, as text of the function that repeats it."""

    def __init__(self, arguments: list[Any]) -> None:
        self.depth = 0
        self.has_failed = self.has_parted = self.is_whole = False
        self.steps: list[Step] = []
        self.outcomes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.number = 0
        self.writes, self.may_miss_late = False, False
        for place, handle in enumerate(arguments):
            self.steps.append(Step(f"{self.name(handle)} = inputs[{place}]", (self.slot(handle).name,), is_pure=True))

    def name(self, handle: Any, constant: bool = False) -> str:
        """Give a value a name."""
        self.number += 1
        is_wide = type(handle) is Lanes
        if type(handle) in side_by_side.HANDLES:
            values = vars(handle)[values_of(handle)]
            name = self.constant(values) if constant else f"R{self.number}_"
            slot = Slot(name, is_wide, values.ndim - is_wide, handle.dtype, values.dtype, values if constant else None)
        else:
            # a block pointer has handles of its own
            name = self.constant(handle) if constant else f"R{self.number}_"
            slot = Slot(name, False, 0, None, None, handle if constant else None)
        vars(handle)["slot"] = self, slot
        return slot.name

    def slot(self, handle: Any) -> Slot:
        recorder, slot = vars(handle).get("slot", (None, None))
        if recorder is not self:
            # made by nothing that is known here
            self.has_failed = True
            return Slot("None", False, 0, None, None)
        assert isinstance(slot, Slot)
        return slot

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def operation(self, name: str, operands: tuple[Any, ...], made: Any) -> None:
        if len(self.steps) > MOST_OPERATIONS:
            self.has_failed = True
        if self.has_failed:
            return
        slots = [self.slot(handle) for handle in handles_in(operands)]
        is_pure = name in PURE
        self.writes |= name in WRITING
        if is_pure and all(slot.constant is not None for slot in slots):
            for handle in handles_in(made):
                self.name(handle, constant=True)
            return
        text = FORMS[name](self, operands, made) if name in FORMS else None
        if text is not None:
            result = self.name(made)
            self.steps.append(Step(f"{result} = {text}", (result,), is_pure))
            return
        self.steps.append(self.called(f"builder.{name}", operands, made, is_pure))

    def called(self, function: str, operands: tuple[Any, ...], made: Any, is_pure: bool) -> Step:
        """Call it as the kernel did."""
        call = f"{function}({', '.join(self.whole(operand) for operand in operands)})"
        if isinstance(made, tuple):
            assert all(type(each) in side_by_side.HANDLES for each in made)
            names = [self.name(each) for each in made]
            handles = ", ".join(names)
            values = ", ".join(f"{name}.{values_of(each)}" for name, each in zip(names, made, strict=True))
            return Step(f"{handles}, = {call}; {handles}, = {values},", (*names,), is_pure)
        if type(made) in side_by_side.HANDLES:
            name = self.name(made)
            return Step(f"{name} = {call}.{values_of(made)}", (name,), is_pure)
        if made is None:
            return Step(call)
        name = self.name(made)
        return Step(f"{name} = {call}", (name,), is_pure)

    def whole(self, operand: Any) -> str:
        """Write an operand as the handle that it was."""
        if type(operand) in side_by_side.HANDLES:
            slot = self.slot(operand)
            return f"{'Lanes' if slot.is_wide else 'handle'}({slot.name}, {self.constant(slot.dtype)})"
        if isinstance(operand, interpreter.BlockPointerHandle):
            return self.slot(operand).name
        if type(operand) in (list, tuple) and any(True for _ in handles_in(operand)):
            return f"[{', '.join(self.whole(part) for part in operand)}]"
        return self.constant(operand)

    def aligned(self, handle: Any, rank: int) -> str:
        """Write an operand's array with axes for this many behind that of the lanes."""
        slot = self.slot(handle)
        missing = rank - slot.rank if slot.is_wide else 0
        return f"{slot.name}[:{', None' * missing}]" if missing > 0 else slot.name

    def operands(self, values: list[Any]) -> list[str]:
        """Write operands of which numpy takes one value each."""
        rank = max(self.slot(value).rank for value in values)
        return [self.aligned(value, rank) for value in values]

    def guard(self, kind: str, values: tuple[Any, ...], found: Any) -> None:
        """Have the kernel's Python see the same again."""
        if self.has_failed:
            return
        slots = [self.slot(value.handle) if isinstance(value, tl.tensor) else None for value in values]
        if found is not PARTED and all(slot is None or slot.constant is not None for slot in slots):
            return
        given = [
            f"({slot.name}, {slot.is_wide})" if slot else f"({value!r}, False)"
            for slot, value in zip(slots, values, strict=True)
        ]
        place = len(self.outcomes)
        self.outcomes.append(found)
        self.may_miss_late |= self.writes
        seen = f"seen = {kind}({', '.join(given)})"
        self.steps.append(Step(f"{seen}\n    if seen != {found!r}: raise MissedError({place}, seen)"))

    def part(self, name: str, operands: tuple[Any, ...]) -> None:
        """End where an operation has the lanes part."""
        if self.has_failed:
            return
        self.has_parted = True
        self.steps.append(self.called(f"builder.{name}", operands, None, False))
        self.steps.append(Step(f"raise MissedError({len(self.outcomes)}, WHOLE)"))
        self.outcomes.append(PARTED)

    def compiled(self) -> Trace:
        lines = named([*needed(self.steps)])
        text = "def repeat(builder, inputs):\n    " + "\n    ".join(lines or ["pass"])
        namespace = {**self.constants, **NAMESPACE}
        exec(compile(text, "<recorded kernel>", "exec"), namespace)
        return Trace(namespace["repeat"], tuple(self.outcomes), self.may_miss_late)


def values_of(handle: Any) -> str:
    """Name the attribute that has them."""
    return "lanes" if type(handle) is Lanes else "data"


def handles_in(value: Any) -> Iterator[Any]:
    if type(value) in side_by_side.HANDLES or isinstance(value, interpreter.BlockPointerHandle):
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from handles_in(part)


REGISTER = re.compile(r"R\d+_")


def needed(steps: list[Step]) -> Iterator[Step]:
    """Leave out what is pure and nobody's operand."""
    used: set[str] = set()
    kept = []
    for step in reversed(steps):
        if step.is_pure and used.isdisjoint(step.outputs):
            continue
        used.update(REGISTER.findall(step.text))
        kept.append(step)
    return reversed(kept)


def named(steps: list[Step]) -> list[str]:
    """Give registers few names, so that memory is used again soon."""
    last: dict[str, int] = {}
    for place, step in enumerate(steps):
        last.update(dict.fromkeys(REGISTER.findall(step.text), place))
    names: dict[str, str] = {}
    free: list[str] = []
    lines = []
    for place, step in enumerate(steps):
        registers = dict.fromkeys(REGISTER.findall(step.text))
        ended = [each for each in registers if last[each] == place and each not in step.outputs]
        free += [names[each] for each in ended]
        for each in step.outputs:
            names[each] = free.pop() if free else f"v{len(names)}"
        lines.append(REGISTER.sub(lambda found: names[found[0]], step.text))
        free += [names[each] for each in step.outputs if last[each] == place]
    return lines


def truth(value: tuple[np.ndarray, bool]) -> bool:
    values, is_wide = value
    return side_by_side.truth_of(values) if is_wide else values.size != 1 or bool(values)


def number(value: tuple[np.ndarray, bool]) -> int:
    values, is_wide = value
    return int(side_by_side.same(values.reshape(-1)) if is_wide else values.item())


def turns(first: tuple[Any, bool], end: tuple[Any, bool], step: tuple[int, bool]) -> tuple[int | None, int]:
    return side_by_side.turns_of(first[0], end[0], step[0])


NAMESPACE = {
    "Lanes": Lanes,
    "MissedError": MissedError,
    "WHOLE": WHOLE,
    "PARTED": PARTED,
    "handle": side_by_side.plain_handle,
    "truth": truth,
    "number": number,
    "turns": turns,
    "broadcast": side_by_side.broadcast,
    "full": np.full,
    "fmod": np.fmod,
    "uint64": np.uint64,
}


def _is_exact(operation: Callable[..., Any], slots: list[Slot], dtype: Any) -> bool:
    """Tell whether the result is of no larger type than it has to be."""
    made = operation(*(np.ones(1, slot.of_numpy) for slot in slots))
    return bool(interpreter._validate_np_data_size(made, dtype))


def _elementwise(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str:
    *values, operation = operands
    call = f"{recorder.constant(operation)}({', '.join(recorder.operands(values))})"
    if len(values) == 1 or _is_exact(operation, [recorder.slot(value) for value in values], made.dtype):
        return call
    return f"{call}.astype({recorder.constant(interpreter._get_np_dtype(made.dtype))})"


def _cast(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str | None:
    source, target = operands
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return None
    return f"{recorder.slot(source).name}.astype({recorder.constant(interpreter._get_np_dtype(target))})"


def _pointer(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str:
    pointer, offset = recorder.operands([*operands])
    size = max(1, operands[0].get_element_ty().primitive_bitwidth // 8)
    return f"{pointer} + {size} * {offset}.astype(uint64)"


def _division(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str:
    left, right = recorder.operands([*operands])
    return f"({left} - fmod({left}, {right})) // {right}"


def _expanded(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str | None:
    value, axis = operands
    slot = recorder.slot(value)
    if axis < 0:
        return None
    return f"{slot.name}[{':, ' * (axis + slot.is_wide)}None]"


def _broadcast(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str:
    value, shape = operands
    wanted, slot = side_by_side.sizes(shape), recorder.slot(value)
    if not slot.is_wide:
        return f"broadcast({slot.name}, {wanted!r})"
    return _wide(recorder, value, wanted)


def _wide(recorder: Recorder, value: Any, shape: tuple[int, ...]) -> str:
    return f"broadcast({recorder.aligned(value, len(shape))}, ({recorder.slot(value).name}.shape[0], {str(shape)[1:]})"


def _splat(recorder: Recorder, operands: tuple[Any, ...], made: Any) -> str | None:
    type_, value = operands
    slot, wanted = recorder.slot(value), side_by_side.sizes(type_.shape)
    if isinstance(value.dtype, tl.block_type) or slot.rank != 1:
        return None
    if slot.is_wide:
        return _wide(recorder, value, wanted)
    return f"full({wanted!r}, {slot.name}, {recorder.constant(interpreter._get_np_dtype(value.dtype))})"


# those that take less time as text than as calls of the builder; None for what is special
FORMS: dict[str, Callable[[Recorder, tuple[Any, ...], Any], str | None]] = {
    "binary_op": _elementwise,
    "ternary_op": _elementwise,
    "unary_op": _elementwise,
    "cast_impl": _cast,
    "create_addptr": _pointer,
    "create_idiv": _division,
    "create_expand_dims": _expanded,
    "create_broadcast": _broadcast,
    "create_splat": _splat,
}


class Recording(Builder):
    """Tells the recorder what it does."""


def _recorded(name: str) -> Callable[..., Any]:
    operate = getattr(Builder, name)

    def call(self: Any, *operands: Any, **keywords: Any) -> Any:
        recorder = _recorder
        if recorder is None or recorder.depth:
            return operate(self, *operands, **keywords)
        recorder.has_failed |= bool(keywords)
        recorder.depth += 1
        try:
            made = operate(self, *operands)
        except PartedError:
            recorder.part(name, operands)
            raise
        finally:
            recorder.depth -= 1
        recorder.operation(name, operands, made)
        return made

    return call


def observed(kind: str, values: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """Find what the kernel's Python sees of some values."""
    recorder = _recorder
    if recorder is None or recorder.depth:
        return find()
    recorder.depth += 1
    try:
        found = find()
    except PartedError:
        recorder.has_parted = True
        recorder.guard(kind, values, PARTED)
        raise
    finally:
        recorder.depth -= 1
    recorder.guard(kind, values, found)
    return found


def _reductions() -> None:
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = _folded(kind.apply_impl)


def _folded(apply: Callable[..., Any]) -> Callable[..., Any]:
    def folded(self: Any, inputs: tuple[Any, ...]) -> Any:
        recorder = _recorder
        if recorder is None or recorder.depth:
            return apply(self, inputs)
        recorder.depth += 1
        try:
            made = apply(self, inputs)
        finally:
            recorder.depth -= 1
        if recorder.has_failed:
            return made
        types = [each.type for each in inputs]

        def again(*handles: Any) -> Any:
            found = apply(self, tuple(map(tl.core.tensor, handles, types)))
            return tuple(each.handle for each in (found if isinstance(found, (tuple, list)) else (found,)))

        results = tuple(each.handle for each in (made if isinstance(made, (tuple, list)) else (made,)))
        operands = tuple(each.handle for each in inputs)
        recorder.steps.append(recorder.called(recorder.constant(again), operands, results, is_pure=True))
        return made

    return folded


def install() -> None:
    """Call when programs run side by side."""
    for name in (*PURE, *OTHERS):
        setattr(Recording, name, _recorded(name))
    _reductions()
    side_by_side.prepared, side_by_side.observed = prepared, observed
