# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of a header under csrc/: its structs, its machine code, and one mistake in it."""

from __future__ import annotations

import pathlib
import re
import shutil
import struct
import subprocess
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.kernels.cuda import nvrtc, program
from tests.kernels import on_host

# stack, stores and loads of spilled registers
NOTHING_SPILLED = ("0", "0", "0")


def c_struct(header: pathlib.Path, name: str) -> str:
    """The fields of a struct of the header as the codes of Python's struct module."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", header.read_text(), re.DOTALL)
    assert body, name
    codes = {"*": "Q", "i64": "q", "int": "i", "float": "f"}
    # neither comments nor functions
    lines = [line.strip() for line in body.group(1).splitlines() if re.fullmatch(r"[^/(]*;", line.strip())]
    return "".join(codes["*" if "*" in line else line.split()[0]] for line in lines)


def assert_packs(layout: struct.Struct, header: pathlib.Path, name: str) -> None:
    packed = re.sub(r"(\d+)([A-Za-z])", lambda found: int(found[1]) * found[2], layout.format)
    assert packed == c_struct(header, name)
    # native alignment leaves no gap before a field, and pads the end as C does
    assert layout.size == -(-sum({"Q": 8, "q": 8, "i": 4, "f": 4}[code] for code in packed) // 8) * 8


def resources(log: str) -> dict[str, tuple[str, ...]]:
    """Parse ptxas's report on each kernel into the form of NOTHING_SPILLED."""
    pattern = r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill"
    return {kernel: tuple(numbers) for kernel, *numbers in re.findall(pattern, log)}


def nvcc_log(file: pathlib.Path, architecture: str, folder: pathlib.Path) -> str:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc here; CI has one")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Xptxas", "-v,-warn-spills"]
    what = ["-x", "cu", "-cubin"] if file.suffix == ".cuh" else ["-c"]
    command = [nvcc, *nvrtc.OPTIONS, target, *strict, *what, str(file), "-o", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stderr


def nvrtc_log(source: bytes, name: str, architecture: str, compiler: nvrtc.Compiler) -> str:
    options = [f"--gpu-architecture=sm_{architecture}", *nvrtc.OPTIONS, "--ptxas-options=-v"]
    cubin, log = compiler.cubin(source, name, options)
    assert "warning" not in log, log
    assert all(kernel.encode() in cubin for kernel in resources(log))
    return log


def mutant(header: pathlib.Path, right: str, wrong: str, folder: pathlib.Path) -> pathlib.Path:
    """The header with other text in the place of some of its own, however that is broken into lines."""
    text = program.text_of(header)
    pattern = r"\s+".join(map(re.escape, right.split()))
    assert re.search(pattern, text), f"the header has changed: {right}"
    mutated = folder / "mutant.cuh"
    mutated.write_text(re.sub(pattern, lambda _: wrong, text))
    return mutated


def seen(compare: Callable[[], list[str]]) -> list[str]:
    try:
        return compare()
    except on_host.KernelFault as fault:
        return [str(fault)]


def assert_compiled_well(source: program.Program, log: str) -> None:
    assert resources(log) == dict.fromkeys(source.kernels, NOTHING_SPILLED), log
    # what ptxas says where products wait for one another, or registers are not what was asked for
    assert "(C75" not in log, log
