# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of a kernel leave the bits that the kernel leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from cpu_sglang import side_by_side, traces
from tests.harness.test_side_by_side import APART, ROWS, TOGETHER, WIDTH, fails, forget, left_by

# by launch: what a kernel's branches and turns depend on; the last ones are repeated
LENGTHS = [[1, 5, 3, 3, 0, 5], [2] * 6, [5, 1, 0, 4, 4, 2], [0, 0, 0, 0, 0, 1]] * 4


@triton.jit  # type: ignore[untyped-decorator]
def written_then_seen(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """A branch behind a write of what was read."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    tl.store(out + row * WIDTH + at, tl.load(out + row * WIDTH + at) + 1)
    if tl.load(lengths + row) > 2:
        tl.store(out + row * WIDTH + at, tl.load(out + row * WIDTH + at) * tl.load(x + at))


@triton.jit  # type: ignore[untyped-decorator]
def peeks(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Python's own look at a value."""
    tl.store(out + tl.program_id(0), tl.zeros((), tl.float32) + peeked(tl.load(lengths)))


def peeked(value: Any) -> int:
    return int(value.handle.data.flat[0])


@triton.jit  # type: ignore[untyped-decorator]
def scaled(x: Any, factor: Any, out: Any, shift: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """Numbers that are Python's."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    tl.store(out + row * WIDTH + at, tl.load(x + at) * factor + shift)


KERNELS: dict[Any, tuple[int, ...]] = {**TOGETHER, **dict.fromkeys((*APART, written_then_seen, peeks), (ROWS,))}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    forget()
    yield
    forget()


def launches(kernel: Any, grid: tuple[int, ...]) -> list[torch.Tensor]:
    return [left_by(kernel, grid, lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def without(kernel: Any, grid: tuple[int, ...]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "enabled", False)
        return launches(kernel, grid)


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By run: whether a recording did."""
    found: list[bool] = []
    repeated = traces.repeated

    def counted(*arguments: Any) -> bool:
        found.append(repeated(*arguments))
        return found[-1]

    monkeypatch.setattr(traces, "repeated", counted)
    return found


@pytest.mark.parametrize("side", (True, False), ids=("side by side", "one after another"))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_bits_are_those_of_the_kernel(
    kernel: Any, side: bool, repeats: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "enabled", side)
    assert are_equal(launches(kernel, KERNELS[kernel]), without(kernel, KERNELS[kernel]))
    # what looks at a value behind a write can only be taken back side by side
    assert any(repeats) == (kernel is not peeks and (side or kernel not in (written_then_seen, fails)))


def test_numbers_of_pythons_are_those_of_the_launch(repeats: list[bool]) -> None:
    x = torch.randn(WIDTH)
    for factor, shift in [(2.0, 0.5), (3.0, 0.5), (2.0, 1), (2, 0.5), (2.0, True)] * 5:
        out = torch.zeros(ROWS, WIDTH)
        scaled[(ROWS,)](x, factor, out, shift=shift, WIDTH=WIDTH)
        assert torch.equal(out, (x * factor + shift).expand(ROWS, WIDTH))
    assert any(repeats)


def test_a_type_of_its_own_is_recorded_for_itself() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16) * 5:
        x, out = torch.randn(WIDTH).to(dtype), torch.zeros(ROWS, WIDTH, dtype=dtype)
        scaled[(ROWS,)](x, 2.0, out, shift=0.5, WIDTH=WIDTH)
        assert torch.equal(out, (x * 2.0 + 0.5).expand(ROWS, WIDTH))


def unguarded(self: Any, kind: str, values: Any, found: Any) -> None: ...


def unaware(value: Any, handles: list[Any]) -> Any:
    return KEY_OF(value, handles) if type(value) is tl.tensor else type(value)


def blind(self: Any, handle: Any, owner: Any = None) -> Any:
    return vars(handle)[self.name]


def forgetful(self: Any, mark: tuple[int, int] = (0, 0)) -> None: ...


KEY_OF = traces.key_of


class Punctual(traces.Recorder):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, False if name == "may_miss_late" else value)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "no value is looked at again": (traces.Recorder, "guard", unguarded),
    "what it has written stays": (side_by_side.Memory, "undo", forgetful),
    "a branch behind a write is like any other": (traces, "Recorder", Punctual),
    "who reads past the recorder is not seen": (traces.Watched, "__get__", blind),
    "numbers of Python's are alike": (traces, "key_of", unaware),
    "a program's number is a constant": (traces, "PURE", (*traces.PURE, "create_get_program_id")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {kernel: without(kernel, grid) for kernel, grid in KERNELS.items()}
    forget()
    monkeypatch.setattr(*MUTANTS[mutant])

    def finds(test: Callable[..., None], *arguments: Any) -> bool:
        try:
            test(*arguments)
        except Exception:
            return True
        return False

    noticed = finds(test_numbers_of_pythons_are_those_of_the_launch, [True])
    for kernel, grid in KERNELS.items():
        for side in (True, False):
            forget()
            monkeypatch.setattr(side_by_side, "enabled", side)
            noticed = noticed or not are_equal(launches(kernel, grid), wanted[kernel])
    assert noticed
