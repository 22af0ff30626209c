# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver through ctypes: loads into torch's context, launches at the least host cost."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

Launch = Callable[..., None]

LIBRARY = "libcuda.so.1"
# of CUfunction_attribute
LOCAL_BYTES, REGISTERS, MOST_SHARED_BYTES = 3, 4, 8


class DriverError(Exception):
    """Raised when the driver is missing or returns an error, with the driver's own message."""


@functools.cache
def library() -> ctypes.CDLL:
    """Open the driver's library. This creates no context, so the process may still fork."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"the NVIDIA driver is not installed here ({error})") from error


def call(function: str, *arguments: object) -> None:
    code = getattr(library(), function)(*arguments)
    if code:
        raise DriverError(f"{function}: {reason(code)}")


def reason(code: int) -> str:
    text = ctypes.c_char_p()
    if library().cuGetErrorString(code, ctypes.byref(text)) or not text.value:
        return f"error {code}"
    return f"{text.value.decode()} (error {code})"


def version() -> int:
    """Return the driver's CUDA version, e.g. 13000; needs no context."""
    found = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(found))
    return found.value


@dataclasses.dataclass(frozen=True)
class Function:
    """One kernel in the context that was current when it was loaded."""

    name: str
    handle: int
    registers: int
    local_bytes: int


def load(cubin: bytes, names: tuple[str, ...]) -> dict[str, Function]:
    """Load the kernels into the current context now, even if the driver loads lazily.

    The module is never unloaded, because a captured graph may hold its kernels.
    """
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    functions = {}
    for name in names:
        handle = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        assert handle.value
        # reading an attribute forces a lazy driver to load now, outside any capture
        registers, local_bytes = attribute(handle, REGISTERS), attribute(handle, LOCAL_BYTES)
        functions[name] = Function(name, handle.value, registers, local_bytes)
    return functions


def attribute(function: ctypes.c_void_p, which: int) -> int:
    value = ctypes.c_int()
    call("cuFuncGetAttribute", ctypes.byref(value), which, function)
    return value.value


class Streams(dict[int, ctypes.c_void_p]):
    """Raw streams as ctypes pointers.

    ctypes would truncate an int to 32 bits unless `argtypes` were set, and those cost 0.7 us a call.
    """

    def __missing__(self, raw: int) -> ctypes.c_void_p:
        self[raw] = stream = ctypes.c_void_p(raw)
        return stream


STREAMS = Streams()


def launcher(
    function: Function,
    threads: int,
    layout: struct.Struct,
    current_stream: Callable[[], int],
    shared_bytes: int = 0,
) -> Launch:
    """Return `launch(blocks, *fields)` of a kernel whose only parameter is a struct, packed from the fields.

    Each thread has its own buffer; the driver has copied it when the call returns.
    """
    if shared_bytes:
        # more than 48 KiB must be requested
        call("cuFuncSetAttribute", ctypes.c_void_p(function.handle), MOST_SHARED_BYTES, shared_bytes)
    frames = threading.local()
    launch_kernel, pack_into, size = library().cuLaunchKernel, layout.pack_into, layout.size
    handle = ctypes.c_void_p(function.handle)

    def new_frame() -> tuple[Any, Any]:
        buffer = ctypes.create_string_buffer(size)
        frames.frame = frame = (buffer, (ctypes.c_void_p * 1)(ctypes.addressof(buffer)))
        return frame

    def launch(blocks: int, *fields: int) -> None:
        try:
            buffer, parameters = frames.frame
        except AttributeError:
            buffer, parameters = new_frame()
        pack_into(buffer, 0, *fields)
        stream = STREAMS[current_stream()]
        code = launch_kernel(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, None)
        if code:
            raise DriverError(f"launch of {function.name} with {blocks} blocks: {reason(code)}")

    return launch
