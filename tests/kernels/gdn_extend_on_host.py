# SPDX-License-Identifier: Apache-2.0
"""csrc/gdn_extend compiled with g++, in the driver's place: the CUDA form on tensors of the host."""

from __future__ import annotations

import ctypes
import pathlib
import re
import struct
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels.cuda import driver, program
from sglang_bcg_fixes.kernels.gdn_extend import cuda
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from tests.kernels import on_host

HOST = "hopper_on_host.hpp"
FEW_BLOCKS = 3
TEXT = PROGRAM.file.read_text()
# kernel: the expression of its threads, and the name of its struct
SIGNATURES = {
    kernel: (threads, name)
    for threads, kernel, name in re.findall(
        r"__launch_bounds__\((.*?), .*?\)\s*(\w+)\(const __grid_constant__ bcg::(\w+) job\)", TEXT
    )
}


def device(launcher: Callable[..., on_host.Launch], multiprocessors: int) -> cuda.Kernels:
    """The kernels that cuda.py has of a device, launched by this function in place of the driver."""
    # names, where the driver has functions
    functions: dict[str, Any] = {kernel: kernel for kernel in PROGRAM.kernels}
    loaded = program.Loaded(functions, "the tests", lambda: 0)
    properties = types.SimpleNamespace(multi_processor_count=multiprocessors)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "load", lambda *_: loaded)
        patched.setattr(driver, "launcher", launcher)
        patched.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return cuda.on_device.__wrapped__(0)


def build(header: pathlib.Path, folder: pathlib.Path) -> cuda.Kernels:
    return launched(dict.fromkeys(SIGNATURES, library(header, folder, SIGNATURES)))


def library(header: pathlib.Path, folder: pathlib.Path, kernels: Collection[str]) -> ctypes.CDLL:
    """Compile some kernels of a header: what others need beside them is not compiled."""
    if not on_host.compiler():
        pytest.skip("no g++ here, which runs the CUDA source on the host")
    structs = {kernel: f"bcg::{SIGNATURES[kernel][1]}" for kernel in kernels}
    return on_host.build(header, structs, folder, HOST)


def launched(libraries: Mapping[str, ctypes.CDLL]) -> cuda.Kernels:
    def launcher(kernel: str, threads: int, layout: struct.Struct, *_: object) -> on_host.Launch:
        return on_host.launcher(libraries[kernel], kernel, threads, layout)

    return device(launcher, FEW_BLOCKS)
