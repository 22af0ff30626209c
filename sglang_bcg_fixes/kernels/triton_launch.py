# SPDX-License-Identifier: Apache-2.0
"""A shortcut past Triton's own launcher, which inspects every argument of every call to find the compiled kernel.

The first call of each kind goes through Triton, which compiles and loads; later calls launch what it returned. Every
call goes through Triton on versions whose launcher nobody has read, and while a launch hook is installed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

Tensor = torch.Tensor

# versions whose launcher has been read: it takes addresses for tensors, and constants in their positions
KNOWN = ("3.5.", "3.6.")
# Triton specialises on whether an address is a multiple of this
ALIGNED = 16

logger = logging.getLogger("sglang_bcg_fixes")


class Launcher:
    """One kernel. Its parameters are, in this order, tensors, strides, numbers and constants.

    Triton specialises it on the types of all tensors, on the alignment of the first `tables` of them, on strides and on
    constants, so calls that agree in these run the same compiled kernel.
    """

    def __init__(self, kernel: Any, tables: int, warps: int) -> None:
        self.kernel = kernel
        self.tables = tables
        self.warps = warps
        self.compiled: dict[Any, Any] = {}
        self.is_direct = triton.__version__.startswith(KNOWN) and not triton.knobs.runtime.interpret
        if not self.is_direct and not triton.knobs.runtime.interpret:
            logger.debug("bcg-fixes: Triton %s launches by itself, which takes the host longer", triton.__version__)

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        strides: tuple[int, ...],
        numbers: Sequence[int],
        constants: tuple[int | bool, ...],
    ) -> None:
        if not self.is_direct or listeners():
            self.kernel[(programs,)](*tensors, *strides, *numbers, *constants, num_warps=self.warps)
            return
        first = tensors[0]
        assert first is not None
        device = first.device.index
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        aligned = tuple([not address or address % ALIGNED == 0 for address in addresses[: self.tables]])
        kind = device, types, aligned, strides, constants
        compiled = self.compiled.get(kind)
        if compiled is None:
            arguments = (*tensors, *strides, *numbers, *constants)
            self.compiled[kind] = self.kernel[(programs,)](*arguments, num_warps=self.warps)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        # no launch metadata and no hooks, since no hook is installed
        nothing = (None, None, None)
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            *nothing,
            *addresses,
            *strides,
            *numbers,
            *constants,
        )


def launched(tables: int, numbers: int, warps: int) -> Callable[[Callable[..., None]], Launcher]:
    """Compile a function of tensors, strides, `numbers` numbers and CONSTANTS, in this order, into a Launcher.

    Nothing that changes from step to step is specialised on: not the numbers, and not the alignment of strides and of
    tensors after the first `tables`. A server must never stop to compile.
    """

    def launcher(function: Callable[..., None]) -> Launcher:
        names = [name for name in inspect.signature(function).parameters if not name.isupper()]
        first_number = len(names) - numbers
        kernel = triton.jit(
            do_not_specialize=names[first_number:], do_not_specialize_on_alignment=names[tables:first_number]
        )(function)
        return Launcher(kernel, tables, warps)

    return launcher


def listeners() -> bool:
    """Return true while a profiler has hooks on launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
