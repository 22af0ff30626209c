# SPDX-License-Identifier: Apache-2.0
"""Launches through ctypes, against a driver that keeps what it was given."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest

from sglang_bcg_fixes.kernels.cuda import driver

CUBIN = b"\x7fELF and more"
LAYOUT = struct.Struct("2Qqi0q")


class Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_uint64),
        ("parameters", ctypes.c_ubyte * 512),
    )


class Setting(ctypes.Structure):
    _fields_ = (("function", ctypes.c_uint64), ("attribute", ctypes.c_int), ("value", ctypes.c_int))


def last(library: ctypes.CDLL) -> Launch:
    return Launch.in_dll(library, "last")


def launcher(library: ctypes.CDLL, stream: int, shared_bytes: int = 0) -> driver.Launch:
    ctypes.c_size_t.in_dll(library, "parameter_bytes").value = LAYOUT.size
    function = driver.load(CUBIN, ("kernel",))["kernel"]
    return driver.launcher(function, 256, LAYOUT, lambda: stream, shared_bytes)


def last_setting(library: ctypes.CDLL) -> tuple[int, int, int]:
    found = Setting.in_dll(library, "last_setting")
    return found.function, found.attribute, found.value


# the default stream, and an address above 32 bits, which ctypes would cut if it were given as an int
@pytest.mark.parametrize("stream", [0, 0x7F12_3456_7890])
def test_a_launch_hands_over_everything_whole(fake_driver: ctypes.CDLL, stream: int) -> None:
    launch = launcher(fake_driver, stream)
    fields = (2**64 - 8, 0x7F00_0000_0010, -3, -(2**31))
    launch(70000, *fields)
    seen = last(fake_driver)
    assert seen.function == 0x7000000000000000 + len("kernel")
    assert list(seen.sizes) == [70000, 1, 1, 256, 1, 1, 0]
    assert seen.stream == stream
    assert LAYOUT.unpack(bytes(seen.parameters[: LAYOUT.size])) == fields


def test_shared_memory_is_asked_for_once_and_is_in_every_launch(fake_driver: ctypes.CDLL) -> None:
    before = last_setting(fake_driver)
    launcher(fake_driver, 0)
    assert last_setting(fake_driver) == before
    launch = launcher(fake_driver, 0, 200_000)
    # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert last_setting(fake_driver) == (0x7000000000000000 + len("kernel"), 8, 200_000)
    for _ in range(2):
        launch(3, 0, 0, 0, 0)
        assert list(last(fake_driver).sizes) == [3, 1, 1, 256, 1, 1, 200_000]


def test_more_shared_memory_than_there_is_is_refused_before_a_launch(fake_driver: ctypes.CDLL) -> None:
    function = driver.load(CUBIN, ("kernel",))["kernel"]
    ctypes.c_int.in_dll(fake_driver, "fail_with").value = 1
    with pytest.raises(driver.DriverError, match="cuFuncSetAttribute: error 1"):
        driver.launcher(function, 256, LAYOUT, lambda: 0, 2**20)


def test_what_the_driver_refuses_is_raised_in_its_words(fake_driver: ctypes.CDLL) -> None:
    launch = launcher(fake_driver, 0)
    failure = ctypes.c_int.in_dll(fake_driver, "fail_with")
    failure.value = 209
    with pytest.raises(driver.DriverError, match=r"launch of kernel with 1 blocks: no kernel image is available"):
        launch(1, 0, 0, 0, 0)
    failure.value = 999
    with pytest.raises(driver.DriverError, match="cuDriverGetVersion: error 999"):
        driver.version()


def test_a_field_that_does_not_fit_is_refused_before_the_launch(fake_driver: ctypes.CDLL) -> None:
    launch = launcher(fake_driver, 0)
    launches = ctypes.c_int.in_dll(fake_driver, "launches")
    before = launches.value
    with pytest.raises(struct.error):
        launch(1, 0, 0, 0, 2**31)
    assert launches.value == before


def test_code_that_the_driver_cannot_load_is_an_error(fake_driver: ctypes.CDLL) -> None:
    with pytest.raises(driver.DriverError, match="cuModuleLoadData"):
        driver.load(b"PTX", ("kernel",))


def test_functions_are_loaded_with_their_resources(fake_driver: ctypes.CDLL) -> None:
    functions = driver.load(CUBIN, ("one", "other"))
    assert {name: (f.registers, f.local_bytes) for name, f in functions.items()} == {"one": (48, 0), "other": (48, 0)}


def test_threads_do_not_share_what_is_packed(fake_driver: ctypes.CDLL) -> None:
    # one thread stands between packing and launching while the other launches
    stands, goes_on = threading.Event(), threading.Event()

    def stream() -> int:
        if threading.current_thread() is first:
            stands.set()
            assert goes_on.wait(10)
        return 0

    ctypes.c_size_t.in_dll(fake_driver, "parameter_bytes").value = LAYOUT.size
    function = driver.load(CUBIN, ("kernel",))["kernel"]
    launch = driver.launcher(function, 256, LAYOUT, stream)
    first = threading.Thread(target=launch, args=(1, 11, 0, 0, 0))
    first.start()
    assert stands.wait(10)
    launch(1, 22, 0, 0, 0)
    goes_on.set()
    first.join()
    assert LAYOUT.unpack(bytes(last(fake_driver).parameters[: LAYOUT.size]))[0] == 11


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    driver.library.cache_clear()
    with pytest.raises(driver.DriverError, match="the NVIDIA driver is not installed here"):
        driver.library()
