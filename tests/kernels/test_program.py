# SPDX-License-Identifier: Apache-2.0
"""Machine code from a header: built ahead, kept, or compiled now; and every reason why not."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import pathlib

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.kernels.cuda import cubins, driver, nvrtc, program
from sglang_bcg_fixes.kernels.fa_metadata.program import PROGRAM
from sglang_bcg_fixes.model import Accepted, Rejected
from tests import processes

HOPPER = (9, 0)
SOURCE = 'extern "C" __global__ void kernel(int* out) { *out = 1; }\n'


@pytest.fixture
def small(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> program.Program:
    """A program of one line, with a cache of its own."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "small.cuh").write_text(SOURCE)
    monkeypatch.setattr(program, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv(flags.CACHE_DIR, str(tmp_path / "cache"))
    return program.Program("small.cuh", ("kernel",))


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((folder / "cache" / "cubins").iterdir())


def compiled(code: program.MachineCode) -> bool:
    return "compiled by NVRTC" in code.origin


def test_it_is_compiled_once_and_then_found(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL, tmp_path: pathlib.Path
) -> None:
    first = program.machine_code(small, HOPPER, 13)
    assert first.cubin.startswith(b"\x7fELF") and b"kernel" in first.cubin
    assert compiled(first) and "sm_90a" in first.origin and str(tmp_path / "cache") in first.origin
    second = program.machine_code(small, HOPPER, 13)
    assert second.cubin == first.cubin and not compiled(second) and "compiled earlier" in second.origin


def test_another_source_architecture_or_driver_is_compiled_anew(
    small: program.Program,
    nvrtc_13: nvrtc.Compiler,
    fake_driver: ctypes.CDLL,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program.machine_code(small, HOPPER, 13)
    assert compiled(program.machine_code(small, (8, 0), 13))
    small.file.write_text(SOURCE.replace("1", "2"))
    assert compiled(program.machine_code(small, HOPPER, 13))
    monkeypatch.setattr(driver, "version", lambda: 13010)
    assert compiled(program.machine_code(small, HOPPER, 13))
    monkeypatch.setattr(nvrtc, "OPTIONS", ("--std=c++17",))
    assert compiled(program.machine_code(small, HOPPER, 13))
    assert len(kept(tmp_path)) == 5


@pytest.mark.parametrize("damage", ["cut off", "altered", "writable", "a link"])
def test_what_cannot_be_trusted_is_compiled_again_and_replaced(
    damage: str,
    small: program.Program,
    nvrtc_13: nvrtc.Compiler,
    fake_driver: ctypes.CDLL,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = program.machine_code(small, HOPPER, 13).cubin
    (file,) = kept(tmp_path)
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "altered":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    elif damage == "writable":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        again = program.machine_code(small, HOPPER, 13)
    assert compiled(again) and again.cubin == good
    assert str(file) in caplog.text and "compiling small.cuh again" in caplog.text
    assert not compiled(program.machine_code(small, HOPPER, 13))


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_says_so(
    small: program.Program,
    nvrtc_13: nvrtc.Compiler,
    fake_driver: ctypes.CDLL,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        code = program.machine_code(small, HOPPER, 13)
    assert compiled(code) and "not kept: nothing can be kept in" in code.origin
    assert "every process will compile small.cuh itself" in caplog.text


def test_code_built_ahead_is_taken_where_it_was_built_from_this_source(
    small: program.Program, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # neither a compiler nor a driver is asked
    monkeypatch.setattr(nvrtc, "compiler", lambda major: pytest.fail("it was compiled"))
    built = small.file.with_suffix(".sm_90a.cubin")
    built.write_bytes(cubins.seal(cubins.key(small.source(), "sm_90a"), b"\x7fELF built"))
    code = program.machine_code(small, HOPPER, 13)
    assert code.cubin == b"\x7fELF built" and str(built) in code.origin
    small.file.write_text(SOURCE + "// changed")
    with caplog.at_level(logging.WARNING):
        assert program.precompiled(small, HOPPER) is None
    assert "is damaged or was built from another source" in caplog.text


def test_code_built_ahead_runs_on_later_chips_of_its_major_only(small: program.Program) -> None:
    small.file.with_suffix(".sm_80.cubin").write_bytes(cubins.seal(cubins.key(small.source(), "sm_80"), b"\x7fELF"))
    small.file.with_suffix(".sm_90a.cubin").write_bytes(cubins.seal(cubins.key(small.source(), "sm_90a"), b"\x7fELF"))
    found = {c: bool(program.precompiled(small, c)) for c in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 1), (10, 0)]}
    assert [capability for capability, there in found.items() if there] == [(8, 0), (8, 6), (8, 9), (9, 0)]


def test_a_program_for_one_architecture_runs_on_no_other(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL
) -> None:
    hoppers = dataclasses.replace(small, only="sm_90a")
    # even what lies in a wheel
    small.file.with_suffix(".sm_80.cubin").write_bytes(cubins.seal(cubins.key(small.source(), "sm_80"), b"\x7fELF"))
    assert compiled(program.machine_code(hoppers, HOPPER, 13))
    answer = program.ready(lambda: program.machine_code(hoppers, (8, 0), 13))
    assert answer == Rejected("small.cuh is written for sm_90a, and this is an sm_80")


def test_a_chip_that_the_compiler_does_not_know_is_a_reason(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL
) -> None:
    answer = program.ready(lambda: program.machine_code(small, (42, 0), 13))
    assert isinstance(answer, Rejected)
    assert "does not know sm_420a; install the nvidia-cuda-nvrtc of a later CUDA 13" in answer.reason


def test_a_source_that_does_not_compile_is_a_reason_with_the_log(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL
) -> None:
    small.file.write_text("__global__ void kernel() { undeclared(); }")
    answer = program.ready(lambda: program.machine_code(small, HOPPER, 13))
    assert isinstance(answer, Rejected)
    assert "cannot compile small.cuh" in answer.reason and '"undeclared" is undefined' in answer.reason


SPILLING = """extern "C" __global__ void __launch_bounds__(1024, 2) kernel(volatile float* x) {
    float found[96];
#pragma unroll
    for (int each = 0; each < 96; ++each) found[each] = x[each];
#pragma unroll
    for (int each = 0; each < 96; ++each) x[each] = found[95 - each];
}
"""


def test_slow_code_is_a_reason_every_time(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL, tmp_path: pathlib.Path
) -> None:
    small.file.write_text(SPILLING)
    for _ in range(2):
        answer = program.ready(lambda: program.machine_code(small, HOPPER, 13))
        assert isinstance(answer, Rejected)
        assert "makes slow code of small.cuh: ptxas warning : Registers are spilled" in answer.reason
        assert "in function 'kernel'" in answer.reason and answer.reason.endswith("nvidia-cuda-nvrtc of CUDA 13")
    assert not (tmp_path / "cache" / "cubins").exists()


def test_no_compiler_is_a_reason(
    small: program.Program, fake_driver: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "places", lambda major: iter([tmp_path / f"libnvrtc.so.{major}"]))
    # no loader knows this version; it may well know a real one
    monkeypatch.setattr(program, "CUDA_MAJORS", (77,))
    answer = program.installed(small)
    assert isinstance(answer, Rejected) and "no NVRTC is installed" in answer.reason
    assert f"{tmp_path}/libnvrtc.so.77" in answer.reason
    answer = program.ready(lambda: program.machine_code(small, HOPPER, 77))
    assert isinstance(answer, Rejected) and "pip install nvidia-cuda-nvrtc" in answer.reason


def test_a_library_that_is_no_compiler_is_a_reason(
    small: program.Program, fake_driver: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnvrtc.so.78").write_bytes(b"not a library")
    monkeypatch.setattr(nvrtc, "places", lambda major: iter([tmp_path / f"libnvrtc.so.{major}"]))
    answer = program.ready(lambda: program.machine_code(small, HOPPER, 78))
    assert isinstance(answer, Rejected) and "NVRTC cannot be loaded" in answer.reason


def test_no_driver_is_a_reason(small: program.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    driver.library.cache_clear()
    answer = program.installed(small)
    assert isinstance(answer, Rejected) and "the NVIDIA driver is not installed here" in answer.reason


def test_a_driver_that_refuses_is_a_reason(small: program.Program, fake_driver: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(fake_driver, "fail_with").value = 209
    answer = program.ready(lambda: driver.load(b"\x7fELF", ("kernel",)))
    assert isinstance(answer, Rejected) and "no kernel image is available" in answer.reason


def test_a_header_is_compiled_with_those_that_it_includes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "whole.cuh").write_text('int first;\n#include "../shared.cuh"\nint last;\n')
    (tmp_path / "shared.cuh").write_text("int shared;\n")
    text = program.text_of(tmp_path / "parts" / "whole.cuh")
    # a compiler names the file and the line that somebody wrote
    assert text.split("\n") == [
        "int first;",
        '#line 1 "shared.cuh"',
        "int shared;",
        '#line 3 "whole.cuh"',
        "int last;",
        "",
    ]
    (tmp_path / "shared.cuh").unlink()
    with pytest.raises(program.Unavailable, match=r"shared\.cuh cannot be read"):
        program.text_of(tmp_path / "parts" / "whole.cuh")


def test_a_header_that_is_missing_is_a_reason(small: program.Program, fake_driver: ctypes.CDLL) -> None:
    small.file.unlink()
    answer = program.installed(small)
    assert isinstance(answer, Rejected) and "reinstall sglang-bcg-fixes" in answer.reason


def test_a_mistake_of_ours_is_not_taken_for_a_machine_without_cuda(small: program.Program) -> None:
    with pytest.raises(ZeroDivisionError):
        program.ready(lambda: 1 // 0)


def test_torch_without_cuda_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    answer = program.ready(lambda: program.load(PROGRAM, 0))
    assert answer == Rejected("this torch is built without CUDA")


def test_nothing_is_loaded_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    answer = program.ready(lambda: program.load(PROGRAM, 0))
    assert isinstance(answer, Rejected) and "a graph is being captured" in answer.reason


def test_the_plan_can_ask_without_torch(fake_driver_file: pathlib.Path) -> None:
    done = processes.python("-m", "tests.scenarios.plan_without_torch", str(fake_driver_file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Accepted") or "no NVRTC is installed" in done.stdout


def test_a_machine_with_driver_and_compiler_is_accepted(
    small: program.Program, nvrtc_13: nvrtc.Compiler, fake_driver: ctypes.CDLL
) -> None:
    assert program.installed(small) == Accepted()


def test_the_sources_of_a_checkout_are_found() -> None:
    assert PROGRAM.file.is_file() and PROGRAM.file.parts[-3:] == ("csrc", "fa_metadata", "fa_metadata.cuh")
