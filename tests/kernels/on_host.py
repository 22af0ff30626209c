# SPDX-License-Identifier: Apache-2.0
"""A header under csrc/ compiled with g++ and run on the CPU, so that the kernels' source is tested without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import pathlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping

import pytest

from sglang_bcg_fixes import flags
from tests import wheels

HERE = pathlib.Path(__file__).parent
# misaligned vectors and undefined arithmetic end the process: on a GPU they are an error or a wrong number. A null
# pointer does so by itself, and looking for one at each access is a quarter of the time to compile
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")
CHECKS = ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr,null,object-size")

# what runs the threads is right, and most of the time is spent there
OPTIMISED = ("-std=c++17", "-O3", "-fPIC", "-w")
THREADS = "device_on_host.hpp"
LIBRARY = "on_host.so"
OBJECT = "on_host.o"
# of a quarter of a megabyte; most are of mutants, which have one for each kernel that is launched
MOST_KEPT = 800

Launch = Callable[..., None]


class CompilerError(Exception):
    """The compiler does not take the source, which is no fault of a kernel that runs."""


class KernelFault(AssertionError):
    """A thread did what hangs or is undefined on a GPU."""


def compiler() -> str | None:
    return shutil.which("g++")


def build(
    header: pathlib.Path,
    kernels: Mapping[str, str],
    folder: pathlib.Path,
    device: str = THREADS,
    is_checked: bool = True,
) -> ctypes.CDLL:
    """The kernels, each with the name of its parameter struct, as `<kernel>_on_host` of a library."""
    options = (*OPTIONS, *(CHECKS if is_checked else ()))
    source = folder / "on_host.cpp"
    exports = "\n".join(f"ON_HOST({kernel}, {parameters})" for kernel, parameters in kernels.items())
    source.write_text(f'#include "{device}"\n#include "{header}"\n{exports}\n')
    objects = [compiled(part) for part in dict.fromkeys((THREADS, device))]

    def compile_into(draft: pathlib.Path) -> None:
        given = (f"-I{precompiled(device, options).name}", f"-I{HERE}", str(source), *map(str, objects))
        run_compiler(*options, *given, "-o", str(draft / LIBRARY))
        forget_all_but_the_last(kept())

    text = run_compiler(*options, "-E", "-P", f"-I{HERE}", str(source))
    parts = (*options, *(each.parent.name for each in objects))
    built = wheels.filled(kept() / fingerprint(text, *parts), compile_into)
    built.touch()
    return ctypes.CDLL(str(built / LIBRARY))


def compiled(device: str) -> pathlib.Path:
    """The functions that a header declares, for all kernels that include it."""
    source = str((HERE / device).with_suffix(".cpp"))

    def compile_into(draft: pathlib.Path) -> None:
        run_compiler(*OPTIMISED, "-c", source, "-o", str(draft / OBJECT))

    built = wheels.filled(kept() / fingerprint(text_of_threads(), device, *OPTIMISED), compile_into)
    built.touch()
    return built / OBJECT


@functools.cache
def text_of_threads() -> str:
    return "".join(file.read_text() for file in sorted(HERE.glob("*.[ch]pp")))


def kept() -> pathlib.Path:
    return flags.cache_dir() / "on_host"


def forget_all_but_the_last(folders: pathlib.Path) -> None:
    used: list[tuple[float, pathlib.Path]] = []
    for folder in folders.iterdir():
        # tests that run beside this one forget, too
        with contextlib.suppress(FileNotFoundError):
            used.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(used)[:-MOST_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


def fingerprint(text: str, *parts: str) -> str:
    """Hash what a file is made of: all text that the compiler reads, its options and other parts, and the compiler."""
    return hashlib.sha256("\0".join((text, run_compiler("--version"), *parts)).encode()).hexdigest()


@functools.cache
def precompiled(device: str, options: tuple[str, ...]) -> tempfile.TemporaryDirectory[str]:
    """Parse what every kernel includes once; g++ finds it beside nothing else."""
    folder = tempfile.TemporaryDirectory()
    run_compiler(*options, "-x", "c++-header", str(HERE / device), "-o", f"{folder.name}/{device}.gch")
    return folder


def assert_compiles(lines: Iterable[str], folder: pathlib.Path) -> None:
    if not compiler():
        pytest.skip("no g++ here")
    source = folder / "checks.cpp"
    source.write_text("\n".join(lines))
    run_compiler("-std=c++17", "-w", "-fsyntax-only", f"-I{HERE}", str(source))


def run_compiler(*arguments: str) -> str:
    command = [str(compiler()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def launcher(library: ctypes.CDLL, kernel: str, threads: int, layout: struct.Struct) -> Launch:
    """Make a launch like driver.launcher's, with another order of threads and blocks at every call."""
    run = getattr(library, f"{kernel}_on_host")
    run.restype = ctypes.c_char_p
    seeds = itertools.count()

    def launch(blocks: int, *fields: int) -> None:
        assert blocks > 0, "a grid of no blocks is an error on a GPU"
        problem = run(layout.pack(*fields), layout.size, blocks, threads, next(seeds))
        if problem:
            raise KernelFault(f"{kernel}: {problem.decode()}")

    return launch
