# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from cpu_sglang import interpreter
from sglang_bcg_fixes.kernels.cuda import driver, nvrtc

HERE = pathlib.Path(__file__).parent
# bfloat16 and libdevice, which Triton's interpreter has not
interpreter.install(overflow_is_an_error=True)


@pytest.fixture(scope="session")
def fake_driver_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", str(HERE / "fake_driver.c"), "-o", str(file)], check=True)
    return file


@pytest.fixture
def fake_driver(fake_driver_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """A driver that succeeds until a test sets `fail_with`."""
    monkeypatch.setattr(driver, "LIBRARY", str(fake_driver_file))
    driver.library.cache_clear()
    library = driver.library()
    ctypes.c_int.in_dll(library, "fail_with").value = 0
    yield library
    driver.library.cache_clear()


@pytest.fixture(scope="session")
def nvrtc_13() -> nvrtc.Compiler:
    if not nvrtc.find(13):
        pytest.skip("no NVRTC here: pip install -r tests/requirements.txt")
    return nvrtc.compiler(13)
