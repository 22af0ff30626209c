"""The CUDA driver through ctypes: machine code into the context that torch uses, launches at the least host cost."""

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
    """The driver is not there, or refused a call, with its own words."""


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's library; opening it starts no context, so a process that forks later is not harmed."""
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
    """Such as 13000; it needs no context."""
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
    """The kernels of this machine code in the current context, really there: nothing is left to the first launch.

    The module lives as long as the process: a captured graph may hold its kernels.
    """
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin)
    functions = {}
    for name in names:
        handle = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        assert handle.value
        # asking for an attribute makes a driver that loads lazily load it now, outside any capture
        registers, local_bytes = attribute(handle, REGISTERS), attribute(handle, LOCAL_BYTES)
        functions[name] = Function(name, handle.value, registers, local_bytes)
    return functions


def attribute(function: ctypes.c_void_p, which: int) -> int:
    value = ctypes.c_int()
    call("cuFuncGetAttribute", ctypes.byref(value), which, function)
    return value.value


class Streams(dict[int, ctypes.c_void_p]):
    """Raw streams as ctypes wants them: an int would be cut to 32 bits without `argtypes`, which cost 0.7 us a call."""

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
    """`launch(blocks, *fields)`: one kernel whose only parameter is a struct, packed from the fields.

    Each thread has a buffer of its own, which the driver has copied when the call returns.
    """
    if shared_bytes:
        # more than 48 KiB have to be asked for
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
