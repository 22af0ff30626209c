# SPDX-License-Identifier: Apache-2.0
"""NVRTC, the compiler that torch depends on: CUDA source in, machine code for one GPU out.

Called through ctypes. `cuda.bindings` and `cuda.core` come with SGLang too, but they load this same library, need one
more package to find it, change their interface between versions, and cost more per launch than ctypes does. Here a
dozen C functions are needed, and their signatures have not changed since CUDA 11.1.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

# nvcc writes the same machine code from these; line numbers cost nothing at run time and serve ncu and the sanitizer
OPTIONS = ("--std=c++17", "--generate-line-info")
# serialised products are told without being asked for
WARN_OF_SPILLS = "--ptxas-options=--warn-on-spills"
SLOW = re.compile(r"^.*(?:Registers are spilled|wgmma\.mma_async instructions are serialized).*$", re.MULTILINE)
# conda's environment, an installed toolkit
OTHER_FOLDERS = (pathlib.Path(sys.prefix) / "lib", pathlib.Path("/usr/local/cuda/lib64"))


class CompilerError(Exception):
    """Raised when NVRTC is missing or rejects the source, with its log."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """One loaded NVRTC."""

    library: ctypes.CDLL
    file: str
    version: tuple[int, int]

    def architectures(self) -> list[int]:
        """List the compute capabilities it can compile for; 90 is 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def cubin(self, source: bytes, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Return machine code and the log; never PTX, which the driver would compile again in its own way."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        try:
            encoded = [option.encode() for option in options]
            code = self.library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
            log = self._output("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if code:
                raise CompilerError(f"NVRTC {dotted(self.version)} cannot compile {name}: {self._reason(code)}\n{log}")
            cubin = self._output("nvrtcGetCUBIN", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))
        if not cubin.startswith(b"\x7fELF"):
            raise CompilerError(f"NVRTC {dotted(self.version)} wrote no machine code for {name} with {options}\n{log}")
        return cubin, log

    def _output(self, function: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(function, program, content)
        return content.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self.library, function)(*arguments)
        if code:
            raise CompilerError(f"{function} of {self.file} says: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        describe = self.library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        text: bytes = describe(code)
        return text.decode()


def slow_code(log: str) -> list[str]:
    """Lines of a log that tell of right but slow code: spilled registers, or products that wait for one another."""
    return SLOW.findall(log)


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def places(major: int) -> Iterator[pathlib.Path]:
    """Yield the paths an NVRTC of this CUDA major version may have; pip's old and new wheels first."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in (f"cu{major}", "cuda_nvrtc"):
            yield pathlib.Path(folder) / library / "lib" / f"libnvrtc.so.{major}"
    for other in OTHER_FOLDERS:
        yield other / f"libnvrtc.so.{major}"


def find(major: int) -> pathlib.Path | None:
    return next((place for place in places(major) if place.is_file()), None)


def is_installed(major: int) -> bool:
    """Return true if `compiler` will find one; the loader may know paths of its own."""
    if find(major):
        return True
    try:
        open_library(f"libnvrtc.so.{major}")
    except CompilerError:
        return False
    return True


@functools.cache
def compiler(major: int) -> Compiler:
    """Load the NVRTC of this CUDA major version; a newer one's output may not load in the driver."""
    return load(find(major) or pathlib.Path(f"libnvrtc.so.{major}"))


def load(file: pathlib.Path) -> Compiler:
    """Load this NVRTC; a name without a folder is looked up by the loader."""
    if file.is_absolute():
        # pip's wheels have no RPATH, so NVRTC finds its built-ins only if they are already loaded
        for builtins in sorted(file.parent.glob(file.name.replace("nvrtc", "nvrtc-builtins") + ".*")):
            open_library(str(builtins))
    library = open_library(str(file))
    numbers = ctypes.c_int(), ctypes.c_int()
    loaded = Compiler(library, library._name, (0, 0))
    loaded._call("nvrtcVersion", ctypes.byref(numbers[0]), ctypes.byref(numbers[1]))
    return dataclasses.replace(loaded, version=(numbers[0].value, numbers[1].value))


def open_library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CompilerError(
            f"NVRTC cannot be loaded ({error}); pip install nvidia-cuda-nvrtc, in the version of torch's CUDA"
        ) from error
