# SPDX-License-Identifier: Apache-2.0
"""A header of csrc/ and its kernels, loaded into torch's context."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import re
import struct
import time
from collections.abc import Callable

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.cuda import cubins, driver, nvrtc
from sglang_bcg_fixes.model import Accepted, Rejected

logger = logging.getLogger("sglang_bcg_fixes")
PACKAGE = pathlib.Path(__file__).parents[2]
# a wheel carries the sources inside the package; a checkout has them beside it
SOURCES = next((place for place in (PACKAGE / "csrc", PACKAGE.parent / "csrc") if place.is_dir()), PACKAGE / "csrc")
# CUDA versions that torch has been built for since SGLang 0.5.11
CUDA_MAJORS = (13, 12)
INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)

Capability = tuple[int, int]


class Unavailable(Exception):
    """Raised when the kernels cannot run here; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Program:
    """`header` is a path below csrc/, `kernels` are the names of its extern "C" __global__ functions.

    `only` is the one architecture it is written for, if its instructions exist on no other.
    """

    header: str
    kernels: tuple[str, ...]
    only: str | None = None

    @property
    def file(self) -> pathlib.Path:
        return SOURCES / self.header

    def runs_on(self, architecture: str) -> bool:
        return self.only in (None, architecture)

    def source(self) -> bytes:
        return text_of(self.file).encode()


def text_of(header: pathlib.Path) -> str:
    """Read a header as one text, with those that it includes in their places; messages of compilers name each."""

    def included(found: re.Match[str]) -> str:
        file, line = header.parent / found[1], text.count("\n", 0, found.end()) + 2
        return f'#line 1 "{file.name}"\n{text_of(file)}#line {line} "{header.name}"'

    try:
        text = header.read_text()
    except OSError as error:
        raise Unavailable(f"{header} cannot be read ({error.strerror}); reinstall sglang-bcg-fixes") from error
    return INCLUDE.sub(included, text)


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """A compiled kernel file; `origin` tells the log where it came from."""

    cubin: bytes
    origin: str


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The kernels of a program on one device."""

    functions: dict[str, driver.Function]
    origin: str
    current_stream: Callable[[], int]

    def launcher(self, kernel: str, threads: int, layout: struct.Struct, shared_bytes: int = 0) -> driver.Launch:
        return driver.launcher(self.functions[kernel], threads, layout, self.current_stream, shared_bytes)


def architecture(capability: Capability) -> str:
    """Name the target architecture; from Hopper on with its architecture-specific instructions."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def precompiled_names(capability: Capability) -> list[str]:
    """List the cubins of a wheel that run here, best first: later chips of a major run earlier code."""
    major, minor = capability
    return [architecture(capability), *(f"sm_{major}{earlier}" for earlier in range(minor, -1, -1))]


def precompiled(program: Program, capability: Capability) -> MachineCode | None:
    """Find what setup.py compiled from this very source, with BCG_FIXES_CUDA_ARCHS."""
    for name in precompiled_names(capability):
        file = program.file.with_suffix(f".{name}.cubin")
        if file.is_file():
            cubin = cubins.unseal(cubins.key(program.source(), name), file.read_bytes())
            if cubin is None:
                logger.warning("bcg-fixes: %s is damaged or was built from another source; it is not used", file)
            else:
                return MachineCode(cubin, f"{name}, from {file}")
    return None


def options(target: str) -> list[str]:
    return [f"--gpu-architecture={target}", *nvrtc.OPTIONS, nvrtc.WARN_OF_SPILLS]


def machine_code(program: Program, capability: Capability, cuda_major: int) -> MachineCode:
    """Return machine code from the wheel, from the cache, or compiled now."""
    target = architecture(capability)
    if not program.runs_on(target):
        raise Unavailable(f"{program.header} is written for {program.only}, and this is an {target}")
    built = precompiled(program, capability)
    if built:
        return built
    compiler, folder = nvrtc.compiler(cuda_major), flags.cache_dir() / "cubins"
    if capability[0] * 10 + capability[1] not in compiler.architectures():
        known = f"NVRTC {nvrtc.dotted(compiler.version)} ({compiler.file})"
        raise Unavailable(f"{known} does not know {target}; install the nvidia-cuda-nvrtc of a later CUDA {cuda_major}")
    source, made_with = program.source(), f"{nvrtc.dotted(compiler.version)} {driver.version()}"
    name = cubins.key(program.header, source, *options(target), made_with)
    try:
        kept = cubins.read(folder, name)
    except cubins.CacheError as error:
        logger.warning("bcg-fixes: %s; compiling %s again", error, program.header)
        kept = None
    if kept:
        return MachineCode(kept, f"{target}, compiled earlier, from {folder / name}")
    started = time.perf_counter()
    cubin, log = compiler.cubin(source, program.header, options(target))
    slow = nvrtc.slow_code(log)
    if slow:
        # nor is it kept: every process has to learn of it
        by = f"NVRTC {nvrtc.dotted(compiler.version)} ({compiler.file})"
        advice = f"install another nvidia-cuda-nvrtc of CUDA {cuda_major}"
        raise Unavailable(f"{by} makes slow code of {program.header}: {slow[0]}; {advice}")
    made = f"{target}, compiled by NVRTC {nvrtc.dotted(compiler.version)} in {time.perf_counter() - started:.2f} s"
    try:
        cubins.keep(folder, name, cubin)
    except cubins.CacheError as error:
        logger.warning("bcg-fixes: %s; every process will compile %s itself", error, program.header)
        return MachineCode(cubin, f"{made}, not kept: {error}")
    return MachineCode(cubin, f"{made}, kept as {folder / name}")


@functools.cache
def load(program: Program, device: int) -> Loaded:
    """Load the program onto this device, once."""
    import torch

    if not torch.version.cuda:
        raise Unavailable("this torch is built without CUDA")
    if torch.cuda.is_current_stream_capturing():
        # loading would invalidate the capture
        raise Unavailable("a graph is being captured; the kernels have to be loaded before")
    code = machine_code(program, torch.cuda.get_device_capability(device), int(torch.version.cuda.split(".")[0]))
    with torch.cuda.device(device):
        # makes torch's context of this device current; changing the device alone may be lazy
        torch.cuda.current_stream().query()
        functions = driver.load(code.cubin, program.kernels)
    return Loaded(functions, code.origin, functools.partial(torch._C._cuda_getCurrentRawStream, device))


def ready(work: Callable[[], object]) -> Accepted | Rejected:
    """Run the work, and turn whatever this machine lacks into a reason."""
    try:
        work()
    except (Unavailable, nvrtc.CompilerError, driver.DriverError) as error:
        return Rejected(" ".join(str(error).split()))
    return Accepted()


def installed(program: Program) -> Accepted | Rejected:
    """Answer before torch is imported, without a context: servers fork after loading plugins."""

    def look() -> None:
        driver.library()
        program.source()
        built_ahead = any(program.file.parent.glob(f"{program.file.stem}.*.cubin"))
        if not built_ahead and not any(map(nvrtc.is_installed, CUDA_MAJORS)):
            places = ", ".join(str(place) for major in CUDA_MAJORS for place in nvrtc.places(major))
            raise Unavailable(f"no NVRTC is installed; looked for {places}; pip install nvidia-cuda-nvrtc")

    return ready(look)
