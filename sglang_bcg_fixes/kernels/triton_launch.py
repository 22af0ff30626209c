"""Triton kernels launched for less: Triton itself looks at every argument of every call to find what it has compiled.

The first call of each kind goes through Triton, which compiles and loads; later ones go straight to what it returned.
Where that is not known to work, or where somebody listens to launches, every call goes through Triton.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

Tensor = torch.Tensor

# whose launchers have been read: they take addresses for tensors, and constants in their places
KNOWN = ("3.5.", "3.6.")
# what Triton tells apart of an address
ALIGNED = 16

logger = logging.getLogger("sglang_bcg_fixes")


class Launcher:
    """One kernel, whose parameters are tensors, numbers that it is specialised on, others, and constants.

    Of the tensors the first `tables` are specialised on how they are aligned; no other is, and no number among the
    others is specialised on at all. So a call is of the same kind as another where types, alignment of the tables,
    specialising numbers and constants are the same.
    """

    def __init__(self, kernel: Any, tables: int, warps: int) -> None:
        self.kernel = kernel
        self.tables = tables
        self.warps = warps
        self.compiled: dict[Any, Any] = {}
        self.is_direct = triton.__version__.startswith(KNOWN) and not triton.knobs.runtime.interpret
        if not self.is_direct and not triton.knobs.runtime.interpret:
            logger.info("bcg-fixes: Triton %s launches by itself, which takes the host longer", triton.__version__)

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        fixed: tuple[int, ...],
        others: Sequence[int],
        constants: tuple[int | bool, ...],
    ) -> None:
        if not self.is_direct or listeners():
            self.kernel[(programs,)](*tensors, *fixed, *others, *constants, num_warps=self.warps)
            return
        first = tensors[0]
        assert first is not None
        device = first.device.index
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        aligned = tuple([not address or address % ALIGNED == 0 for address in addresses[: self.tables]])
        kind = device, types, aligned, fixed, constants
        compiled = self.compiled.get(kind)
        if compiled is None:
            arguments = (*tensors, *fixed, *others, *constants)
            self.compiled[kind] = self.kernel[(programs,)](*arguments, num_warps=self.warps)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        # no metadata and no hooks: nobody listens
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
            *fixed,
            *others,
            *constants,
        )


def launched(tables: int, numbers: int, warps: int) -> Callable[[Callable[..., None]], Launcher]:
    """Compile a function of tensors, strides, numbers and CONSTANTS, in this order, and launch it by a Launcher.

    Nothing that changes from step to step is specialised on: neither the numbers, of which there are `numbers`, nor how
    strides and the tensors behind the first `tables` are aligned.
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
    """Whether a profiler wants to hear of launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
