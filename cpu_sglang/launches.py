# SPDX-License-Identifier: Apache-2.0
"""Find once for each kernel what Triton's interpreter finds out anew in every launch.

A server's step launches a dozen small kernels in each layer, and Triton took longer to inspect their signatures, to
replace all of its language and to put it back, and to copy what is on the CPU to the CPU, than the kernels ran.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter, jit

from . import side_by_side

# of one type whatever its value is
INTEGER, SMALLEST, BEYOND = tl.int32, -(2**31), 2**31
# what the interpreter takes apart
PARTS = (tuple, interpreter.TensorDescriptor)

launch_of_triton = interpreter.GridExecutor.__call__


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# from 3.11 on, Python keeps its frames in pieces of 16 KiB, and gives a piece back with its last frame:
# where a launch begins at the end of one, each operation takes a new one, and the system clears its pages. A frame of
# this size takes a MiB, with room for all others
_call_with_room = types.FunctionType(_call.__code__.replace(co_stacksize=1 << 16), globals())


class Declared(NamedTuple):
    """A kernel as its launches need it."""

    function: Callable[..., Any]
    constants: list[str]
    names: tuple[str, ...]
    defaults: dict[str, Any]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Give each parameter its argument; None where Triton would say what is wrong."""
        named = dict(zip(self.names, args, strict=False))
        # others are for the compiler
        given = {name: value for name, value in kwargs.items() if name in self.names}
        if len(args) > len(self.names) or named.keys() & given.keys():
            return None
        known = self.defaults | named | given
        return {name: known[name] for name in self.names} if len(known) == len(self.names) else None


def _declared(function: Callable[..., Any], launch: Any) -> Declared:
    @functools.wraps(function)
    def programs(**arguments: Any) -> None:
        interpreter.interpreter_builder.run(function, arguments)

    signature = inspect.signature(function)
    vars(programs)["__signature__"], parameters = signature, signature.parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return Declared(programs, launch.constexprs, tuple(parameters), defaults)


@functools.cache
def _pointer_to(dtype: torch.dtype) -> Any:
    return tl.str_to_ty(jit.mangle_type(torch.empty(1, dtype=dtype)), None)


def _is_here(value: Any) -> bool:
    """True for what a launch takes as it is: a tensor of the CPU, and what is none and has none in it."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return not isinstance(value, PARTS) and not hasattr(value, "data_ptr")


def converted(value: Any) -> Any:
    """Make an argument what a kernel's Python sees of it."""
    if type(value) is int and SMALLEST <= value < BEYOND:
        return tl.tensor(side_by_side.plain_handle(np.array([value], np.int32), INTEGER), INTEGER)
    if isinstance(value, torch.Tensor):
        pointer = _pointer_to(value.dtype)
        return tl.tensor(side_by_side.plain_handle(np.array([value.data_ptr()], np.uint64), pointer), pointer)
    return interpreter._implicit_cvt(value)


def launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """Do as Triton's own for what is on the CPU, and leave the rest to it."""
    bound = self.declared.bound(args, kwargs)
    if bound is None or self.pre_run_hooks or not all(map(_is_here, bound.values())):
        launch_of_triton(self, *args, **kwargs)
        return
    interpreter._patch_lang(self.fn)
    arguments = {name: each if name in self.constexprs else converted(each) for name, each in bound.items()}
    grid = self.grid(arguments) if callable(self.grid) else self.grid
    assert len(grid) <= 3, "grid must have at most 3 dimensions"
    # a list is an error there, too
    grid = grid + (1,) * (3 - len(grid))
    interpreter.interpreter_builder.set_grid_dim(*grid)
    try:
        # the first program runs them all
        if all(size > 0 for size in grid):
            self.fn(**arguments)
    except Exception as error:
        if knobs.compilation.front_end_debugging:
            raise
        raise interpreter.InterpreterError(repr(error)) from error


def install() -> None:
    """Call when all else of the interpreter is patched."""
    make = interpreter.GridExecutor.__init__
    known: dict[Any, Declared] = {}

    def init(self: Any, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        declared = known.get(fn)
        if declared is None:
            make(self, fn, arg_names, grid, pre_run_hooks)
            declared = known[fn] = _declared(fn, self)
        self.declared, self.fn, self.constexprs = declared, declared.function, declared.constants
        self.arg_names, self.grid, self.pre_run_hooks = arg_names, grid, pre_run_hooks

    def launch_with_room(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _call_with_room(launch, self, *args, **kwargs)

    interpreter.GridExecutor.__init__, interpreter.GridExecutor.__call__ = init, launch_with_room
