# SPDX-License-Identifier: Apache-2.0
"""A header is compiled for the host once, and again when anything about it is another; its threads' own mistakes."""

from __future__ import annotations

import ctypes
import pathlib
import struct
from collections.abc import Callable

import pytest
import torch

from sglang_bcg_fixes import flags
from tests.kernels import on_host

pytestmark = pytest.mark.skipif(not on_host.compiler(), reason="no g++ here")

Build = Callable[[], int]


@pytest.fixture
def header(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(flags.CACHE_DIR, str(tmp_path / "cache"))
    (tmp_path / "included.cuh").write_text("constexpr int NUMBER = 3;")
    file = tmp_path / "kernels.cuh"
    file.write_text('#include "included.cuh"\n#define MORE 0\nextern "C" int number() { return NUMBER + MORE; }')
    return file


@pytest.fixture
def number(header: pathlib.Path, tmp_path: pathlib.Path) -> Build:
    return lambda: int(on_host.build(header, {}, tmp_path).number())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List what has been compiled, and not only read."""
    found: list[str] = []
    run_compiler = on_host.run_compiler

    def counted(*arguments: str) -> str:
        found.extend(arguments[-1:] if arguments[-2:-1] == ("-o",) and arguments[-1].endswith(".so") else ())
        return run_compiler(*arguments)

    monkeypatch.setattr(on_host, "run_compiler", counted)
    return found


def test_it_is_compiled_once(number: Build, compiled: list[str]) -> None:
    assert [number(), number()] == [3, 3]
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [("kernels.cuh", "MORE 0", "MORE 1", 4), ("included.cuh", "NUMBER = 3", "NUMBER = 5", 5)],
)
def test_another_text_is_another_library(
    number: Build, compiled: list[str], header: pathlib.Path, file: str, old: str, new: str, found: int
) -> None:
    assert number() == 3
    changed = header.parent / file
    changed.write_text(changed.read_text().replace(old, new))
    assert number() == found
    assert len(compiled) == 2


@pytest.mark.parametrize("options", ("OPTIONS", "CHECKS", "OPTIMISED"))
def test_other_options_make_another_library(
    number: Build, compiled: list[str], monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    number()
    monkeypatch.setattr(on_host, options, (*getattr(on_host, options), "-DUNUSED"))
    number()
    assert len(compiled) == 2


def test_the_last_ones_are_kept(
    number: Build, compiled: list[str], header: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(on_host, "MOST_KEPT", 2)
    for value in range(4):
        header.write_text(f'extern "C" int number() {{ return {value}; }}')
        assert number() == value
    # and the one that was being made
    assert len(list((tmp_path / "cache" / "on_host").iterdir())) <= 3
    assert number() == 3 and len(compiled) == 4


def test_a_lane_that_no_warp_has_is_a_fault(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "shuffles.cuh"
    file.write_text(
        "struct Job { int distance; };\n"
        "inline void shuffles(const Job& job) { __shfl_xor_sync(0xffffffffu, 1, job.distance); }"
    )
    library = on_host.build(file, {"shuffles": "Job"}, tmp_path)
    launch = on_host.launcher(library, "shuffles", 64, struct.Struct("i"))
    launch(2, 31)
    with pytest.raises(on_host.KernelFault, match="a lane that no warp has"):
        launch(2, 32)
    launch(2, 1)


def test_a_register_that_nobody_has_set_is_not_a_number(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "forgets.cuh"
    file.write_text(
        "struct Job { float* to; };\n"
        # the compiler must not know that nobody has set it
        'inline void forgets(const Job& job) { float own[8]; asm volatile("" : : "r"(own) : "memory");\n'
        "__syncthreads(); job.to[threadIdx.x] += own[3]; own[3] = 2; }"
    )
    library = on_host.build(file, {"forgets": "Job"}, tmp_path)
    launch = on_host.launcher(library, "forgets", 64, struct.Struct("Q"))
    for blocks in (1, 2):
        found = torch.zeros(64)
        launch(blocks, found.data_ptr())
        assert bool(found.isnan().all())


def test_each_half_is_the_float_that_torch_makes_of_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "halves.cuh"
    file.write_text(
        'extern "C" void widen(float* to, int is_bf16) {\n'
        "for (unsigned half = 0; half < 1 << 16; ++half)\n"
        "to[half] = is_bf16 ? host::as_float<true>(half) : host::as_float<false>(half); }"
    )
    library = on_host.build(file, {}, tmp_path, "hopper_on_host.hpp")
    for number, kind in enumerate((torch.float16, torch.bfloat16)):
        found, wanted = torch.empty(1 << 16), torch.arange(1 << 16).to(torch.uint16).view(kind).float()
        library.widen(ctypes.c_void_p(found.data_ptr()), number)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num().view(torch.int32), wanted.nan_to_num().view(torch.int32))
