# SPDX-License-Identifier: Apache-2.0
"""A launch of the interpreter prepared once for each kernel: its arguments and errors are those of Triton's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterError

from cpu_sglang import interpreter, launches

interpreter.install()

NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63, 0.5, None, "text")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)


@triton.jit  # type: ignore[untyped-decorator]
def shifted(
    x: Any, out: Any, length: Any, offset: Any, factor: Any = 2, pair: Any = None, WIDTH: tl.constexpr = 4
) -> None:
    """Write a piece of a tensor, and the numbers of programs."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at, mask=at < length, other=0) * factor + offset
    if pair is not None:
        value += pair[0] * tl.num_programs(0)
    tl.store(out + at, value, mask=at < length)


@triton.jit  # type: ignore[untyped-decorator]
def wrong(x: Any, WIDTH: tl.constexpr) -> None:
    """Ask for what is no shape."""
    tl.store(x + tl.arange(0, WIDTH), tl.zeros((3,), tl.float32))


def told(value: Any) -> Any:
    """Tell what a kernel's Python sees of an argument."""
    if not isinstance(value, tl.tensor):
        return type(value), value
    data = value.handle.data
    return str(value.type), str(value.dtype), str(value.handle.dtype), data.dtype, data.tolist()


@pytest.mark.parametrize("value", [*NUMBERS, *(torch.ones(6, dtype=dtype)[2:] for dtype in DTYPES)], ids=str)
def test_an_argument_is_what_triton_makes_of_it(value: Any) -> None:
    assert told(launches.converted(value)) == told(triton_interpreter._implicit_cvt(value))


@pytest.mark.parametrize(("value", "refusal"), [(2**64, OverflowError), (True, ValueError)])
def test_what_triton_refuses_is_refused(value: Any, refusal: type[Exception]) -> None:
    for convert in (launches.converted, triton_interpreter._implicit_cvt):
        with pytest.raises(refusal):
            convert(value)


@pytest.fixture(params=["once", "anew"])
def is_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Launch as here, and by what Triton has in its place."""
    if request.param == "anew":
        monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", launches.launch_of_triton)
    return bool(request.param == "once")


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((5, 10), {}, [12, 14, 16, 18, 20]),
        ((5,), {"offset": 10}, [12, 14, 16, 18, 20]),
        ((5, 10, 3), {"num_warps": 4, "num_stages": 1}, [13, 16, 19, 22, 25]),
        ((), {"length": 3, "offset": 0, "WIDTH": 2}, [2, 4, 6, -1, -1]),
        ((5, 0.5, 1), {}, [1.5, 2.5, 3.5, 4.5, 5.5]),
        ((5, 0), {"pair": (100, 1)}, [202, 204, 206, 208, 210]),
        ((5, 0, 2, (100, 1), 8), {}, [202, 204, 206, 208, 210]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("is_once")
def test_arguments_go_where_they_belong(args: Any, kwargs: Any, expected: list[float]) -> None:
    # the tensor begins inside its memory
    x, out = torch.arange(8.0)[1:], torch.full((5,), -1.0)
    shifted[(2,)](x, out, *args, **kwargs)
    assert out.tolist() == expected


@pytest.mark.usefixtures("is_once")
def test_a_grid_is_asked_with_the_arguments_and_may_be_empty() -> None:
    x, out = torch.arange(5.0), torch.full((5,), -1.0)

    def grid(given: dict[str, Any]) -> tuple[int, ...]:
        assert given["WIDTH"] == 4 and isinstance(given["length"], tl.tensor)
        return (triton.cdiv(int(given["length"].handle.data.item()), given["WIDTH"]),)

    shifted[grid](x, out, 5, 0)
    assert out.tolist() == [0, 2, 4, 6, 8]
    shifted[(0,)](x, out, 5, 1)
    shifted[(2, 0)](x, out, 5, 1)
    assert out.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [((), {}, "missing"), ((1,) * 9, {}, "positional"), ((5, 0), {"x": 1}, "multiple values")],
    ids=["too few", "too many", "twice"],
)
@pytest.mark.usefixtures("is_once")
def test_what_does_not_fit_is_told_as_triton_does(args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        shifted[(1,)](torch.ones(4), torch.ones(4), *args, **kwargs)


@pytest.mark.usefixtures("is_once")
def test_an_error_in_a_kernel_is_the_interpreters() -> None:
    with pytest.raises(InterpreterError):
        wrong[(1,)](torch.ones(4), WIDTH=4)


@pytest.mark.usefixtures("is_once")
def test_a_hook_runs_before_each_launch() -> None:
    seen: list[Any] = []

    @triton.jit  # type: ignore[untyped-decorator]
    def hooked(x: Any) -> None:
        tl.store(x, 1.0)

    hooked.add_pre_run_hook(lambda *args, **kwargs: seen.append((args, kwargs)))
    for _ in range(2):
        hooked[(1,)](torch.zeros(1))
    assert len(seen) == 2


def test_what_a_kernel_declares_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.arange(5.0), torch.zeros(5)
    shifted[(2,)](x, out, 5, 0)

    def asked(*_: object) -> None:
        raise AssertionError("found again")

    monkeypatch.setattr(launches, "_declared", asked)
    monkeypatch.setattr(triton_interpreter.inspect, "getfullargspec", asked)
    shifted[(2,)](x, out, 5, 1)
    assert out.tolist() == [1, 3, 5, 7, 9]
