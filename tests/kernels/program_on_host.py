# SPDX-License-Identifier: Apache-2.0
"""A program of csrc/ for Hopper compiled with g++, in the driver's place: it runs on tensors of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import re
import struct
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels.cuda import driver, program
from tests.kernels import on_host

HOST = "hopper_on_host.hpp"
FEW_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Declared:
    """The parameters that cuda.py launches a kernel with."""

    threads: int
    layout: struct.Struct
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class OnHost:
    """`cuda` is the module that launches the program."""

    cuda: Any
    program: program.Program

    @property
    def text(self) -> str:
        return program.text_of(self.program.file)

    @property
    def signatures(self) -> dict[str, tuple[str, str]]:
        """Read of each kernel the expression of its threads, and the name of its struct."""
        pattern = r"__launch_bounds__\((.*?), .*?\)\s*(\w+)\(const __grid_constant__ bcg::(\w+) job\)"
        return {kernel: (threads, name) for threads, kernel, name in re.findall(pattern, self.text)}

    def device(self, launcher: Callable[..., on_host.Launch], multiprocessors: int) -> Any:
        """Make the kernels that the module has of a device, launched by this function in place of the driver."""
        # names, where the driver has functions
        functions: dict[str, Any] = {kernel: kernel for kernel in self.program.kernels}
        loaded = program.Loaded(functions, "the tests", lambda: 0)
        properties = types.SimpleNamespace(multi_processor_count=multiprocessors)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(program, "load", lambda *_: loaded)
            patched.setattr(driver, "launcher", launcher)
            patched.setattr(torch.cuda, "get_device_properties", lambda _: properties)
            return self.cuda.on_device.__wrapped__(0)

    def library(
        self, header: pathlib.Path, folder: pathlib.Path, kernels: Collection[str], is_checked: bool = True
    ) -> ctypes.CDLL:
        """Compile some kernels of a header: what others need beside them is not compiled."""
        if not on_host.compiler():
            pytest.skip("no g++ here, which runs the CUDA source on the host")
        structs = {kernel: f"bcg::{self.signatures[kernel][1]}" for kernel in kernels}
        return on_host.build(header, structs, folder, HOST, is_checked)

    def launched(self, libraries: Mapping[str, ctypes.CDLL]) -> Any:
        def launcher(kernel: str, threads: int, layout: struct.Struct, *_: object) -> on_host.Launch:
            return on_host.launcher(libraries[kernel], kernel, threads, layout)

        return self.device(launcher, FEW_BLOCKS)

    def mutated(self, right: ctypes.CDLL, header: pathlib.Path, folder: pathlib.Path, kernels: Collection[str]) -> Any:
        """Make right kernels with some of another header, each of which is compiled when it is first launched."""

        def launcher(kernel: str, threads: int, layout: struct.Struct, *_: object) -> on_host.Launch:
            @functools.cache
            def compiled() -> on_host.Launch:
                # what checks look for ends the process, and shows no mistake to a test
                library = self.library(header, folder, [kernel], is_checked=False) if kernel in kernels else right
                return on_host.launcher(library, kernel, threads, layout)

            return lambda *fields: compiled()(*fields)

        return self.device(launcher, FEW_BLOCKS)

    def build(self, header: pathlib.Path, folder: pathlib.Path) -> Any:
        return self.launched(dict.fromkeys(self.signatures, self.library(header, folder, self.signatures)))

    def declared(self) -> dict[str, Declared]:
        found: dict[str, Declared] = {}

        def launcher(
            kernel: str, threads: int, layout: struct.Struct, stream: object, shared_bytes: int = 0
        ) -> on_host.Launch:
            found[kernel] = Declared(threads, layout, shared_bytes)
            return lambda *_: None

        self.device(launcher, 1)
        return found

    def assert_constants(
        self, modules: Iterable[types.ModuleType], needed: Collection[str], folder: pathlib.Path
    ) -> None:
        """Compare numbers of these modules with those of the header that are named alike, and threads of kernels."""

        def of_header(name: str) -> str:
            return "k" + "".join(word.capitalize() for word in name.split("_"))

        text, declared = self.text, self.declared()
        numbers = {
            name: value
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, int) and re.search(rf"\b{of_header(name)}\b", text)
        }
        assert set(needed) <= set(numbers)
        checks = [f'static_assert(bcg::{of_header(name)} == {value}, "{name}");' for name, value in numbers.items()]
        for kernel, (threads, _) in self.signatures.items():
            checks.append(f'static_assert({threads} == {declared[kernel].threads}, "threads of {kernel}");')
        on_host.assert_compiles([f'#include "{HOST}"', f'#include "{self.program.file}"', *checks], folder)

    def recorded(self, multiprocessors: int = FEW_BLOCKS) -> tuple[Any, list[tuple[Any, ...]]]:
        """Make kernels that only note their launches."""
        launches: list[tuple[Any, ...]] = []

        def launcher(kernel: str, *_: object) -> on_host.Launch:
            return lambda *fields: launches.append((kernel, *fields))

        return self.device(launcher, multiprocessors), launches
