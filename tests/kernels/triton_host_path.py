# SPDX-License-Identifier: Apache-2.0
"""Everything between a call and the driver, with a driver that only keeps what it is given: no GPU, nothing runs.

Run with Triton's own launchers, and the fake driver where they look for the real one. Each call is made three times:
through Triton, and twice by our launcher, which goes the short way the second time. All three must be alike.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import sys
import time
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from sglang_bcg_fixes.kernels import triton_launch
from sglang_bcg_fixes.kernels.fa_metadata import triton as implementation
from tests.kernels import fa_metadata_cases as cases

STREAM = 0x77
SIZES = {"i32": 4, "i64": 8}


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_ubyte * 8 * 64),
    ]


def fake_gpu() -> Any:
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    # its launcher looks for the type of descriptors, which no kernel here has
    nvidia.PyCUtensorMap = type(None)  # type: ignore[attr-defined]
    utils = types.SimpleNamespace(
        # another function for other code, so that it shows which one was launched
        load_binary=lambda name, code, *_: (1, zlib.crc32(code), 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 2**17, "multiprocessor_count": 132},
    )
    return types.SimpleNamespace(
        utils=utils,
        launcher_cls=nvidia.CudaLauncher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: STREAM,
        get_device_capability=lambda *_: (9, 0),
    )


class Recorder:
    """Launches that reached the driver since the last look."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.count = ctypes.c_int.in_dll(self.library, "launches")
        self.last = Launch.in_dll(self.library, "last")

    def expect(self, signature: dict[str, str]) -> None:
        """The driver does not know how many parameters there are."""
        passed: list[ctypes.c_int | int] = [SIZES.get(kind, 8) for kind in signature.values() if kind != "constexpr"]
        sizes = (ctypes.c_int * 64).in_dll(self.library, "parameter_sizes")
        sizes[: len(passed)] = passed
        ctypes.c_int.in_dll(self.library, "parameter_count").value = len(passed)

    def launched(self, work: Callable[[], object]) -> bytes:
        before = self.count.value
        work()
        assert self.count.value == before + 1, "not one launch"
        return bytes(self.last)


def main() -> None:
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM
    triton.runtime.driver.set_active(fake_gpu())
    recorder = Recorder(sys.argv[1])
    seen = {"alike": 0, "short": 0}
    slow: list[float] = []
    fast: list[float] = []
    ours = triton_launch.Launcher.__call__

    def compared(
        self: triton_launch.Launcher,
        programs: int,
        tensors: Sequence[torch.Tensor | None],
        strides: tuple[int, ...],
        numbers: Sequence[int],
        constants: tuple[int | bool, ...],
    ) -> None:
        arguments = (*tensors, *strides, *numbers, *constants)

        def through_triton() -> Any:
            return self.kernel[(programs,)](*arguments, num_warps=self.warps)

        recorder.expect({})
        recorder.expect(through_triton().src.signature)
        expected = recorder.launched(through_triton)
        kinds = len(self.compiled)
        for _ in range(2):
            assert recorder.launched(lambda: ours(self, programs, tensors, strides, numbers, constants)) == expected
        seen["alike"] += 1
        seen["short"] += len(self.compiled) == kinds
        for way, times in (
            (through_triton, slow),
            (lambda: ours(self, programs, tensors, strides, numbers, constants), fast),
        ):
            began = time.perf_counter()
            for _ in range(20):
                way()
            times.append((time.perf_counter() - began) / 20 * 1e6)

    triton_launch.Launcher.__call__ = compared  # type: ignore[method-assign]
    for operation in cases.OPERATIONS:
        for seed in range(int(os.environ.get("CASES", "25"))):
            call = cases.draw(operation, random.Random(seed))
            call.run(implementation)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(lambda *_: None)
    assert triton_launch.listeners()
    times = {"triton_us": sorted(slow)[len(slow) // 2], "direct_us": sorted(fast)[len(fast) // 2]}
    print("RESULT", json.dumps(seen | times))


if __name__ == "__main__":
    main()
