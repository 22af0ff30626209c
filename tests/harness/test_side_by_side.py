# SPDX-License-Identifier: Apache-2.0
"""Programs of a launch that run side by side leave the bits that one after another leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.errors import InterpreterError

from cpu_sglang import interpreter, side_by_side, traces

interpreter.install()

ROWS, WIDTH = 6, 16


@triton.jit  # type: ignore[untyped-decorator]
def branches(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Turns and branches by row, a division of negative numbers, a mask and a narrower type."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), tl.float32)
    for turn in range(0, tl.load(lengths + row)):
        sums += tl.load(x + (row + turn) * WIDTH + at, mask=at < WIDTH - part, other=0.5)
    if row > 1 and part == 0:
        sums = sums * 2 + (row - 4) // 3 + (row - 4) % 3
    here = out + (row * tl.num_programs(1) + part) * WIDTH + at
    tl.store(here, (tl.exp(sums * 0.1) + libdevice.tanh(sums)).to(tl.float16), mask=at < WIDTH - 3)


@triton.jit  # type: ignore[untyped-decorator]
def turns(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Turns that begin and end in different places, and are as many; the greater and the lesser of two."""
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), tl.float32)
    for first in range(row, row + 5, 2):
        sums += tl.load(x + first * WIDTH + at) * (first % 3 + first)
    for first in tl.range(max(row, 3) - row, WIDTH, 4 * WIDTH, num_stages=2):
        sums += tl.load(x + tl.multiple_of(first, 1) + at)
    for turn in range(row * 3 - 9, row * 3 - 8):
        sums += turn
    for turn in tl.range(2):
        sums += turn * min(row, 2 + turn) * min(2, 3)
    tl.store(out + row * WIDTH + at, sums + min(WIDTH, row * 4) + max(row - 3, 0))


@triton.jit  # type: ignore[untyped-decorator]
def folds(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Reductions and scans along each axis."""
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    block = tl.load(x + row * WIDTH + at[:, None] + at[None, :])
    sums = tl.sum(block, 0) + tl.max(block, 1) - tl.min(block, 0) + tl.sum(tl.max(block, 0))
    sums += tl.cumsum(block[:, :], 0).to(tl.float32).trans().sum(1) + tl.cumsum(tl.sum(block, 0), 0, reverse=True)
    greatest, place = tl.max(block, 1, return_indices=True)
    tl.store(
        out + row * WIDTH + at, sums + greatest + place + tl.argmin(block, 0) + tl.sum(block, 0, keep_dims=True).sum()
    )


@triton.jit  # type: ignore[untyped-decorator]
def shapes(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Everything that moves values about, and products of matrices in two types."""
    row = tl.program_id(2)
    at = tl.arange(0, WIDTH)
    block = tl.load(x + row * WIDTH + at[:, None] * 2 + at[None, :])
    product = tl.dot(block, tl.trans(block)) + tl.dot(block.to(tl.bfloat16), block.T.to(tl.bfloat16))
    even, odd = tl.split(tl.reshape(product, (WIDTH, WIDTH // 2, 2)))
    joined = tl.reshape(tl.join(odd, even), (WIDTH, WIDTH)).to(tl.int32, bitcast=True)
    pairs = tl.sum(joined.to(tl.float32, bitcast=True), 1)
    pairs += tl.gather(pairs, (at + row) % WIDTH, 0) + tl.cat(at, at + row, can_reorder=True).to(tl.float32).sum()
    pairs += tl.sum(((at + row)[:, None] * 3 + (at - row)[None, :]).to(tl.float32), 1)
    tl.store(out + row * WIDTH + at, tl.where(at > row, tl.abs(pairs), tl.fma(pairs, 2.0, 1.0)))


@triton.jit  # type: ignore[untyped-decorator]
def block_pointers(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Block pointers that move, and reach over the edge."""
    row = tl.program_id(0)
    read = tl.make_block_ptr(x + row * WIDTH, (5, WIDTH), (WIDTH, 1), (row - 1, 0), (4, WIDTH), (1, 0))
    written = tl.make_block_ptr(out, (ROWS_WRITTEN * WIDTH,), (1,), (row * WIDTH,), (WIDTH,), (0,))
    block = tl.load(read, boundary_check=(0,), padding_option="zero")
    block += tl.load(tl.advance(read, (1, 0)), boundary_check=(0, 1))
    tl.store(written, tl.sum(block, 0), boundary_check=(0,))


@triton.jit  # type: ignore[untyped-decorator]
def in_place(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Each program changes what is its own, twice."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(out + at) + tl.load(x + at))
    tl.store(out + at, tl.load(out + at) * 3)


@triton.jit  # type: ignore[untyped-decorator]
def handed_on(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Each program reads what the one before it has written."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    before = tl.load(out + (row - 1) * WIDTH + at, mask=(at >= 0) & (row > 0), other=1.0)
    tl.store(out + row * WIDTH + at, before + tl.load(x + row * WIDTH + at))


@triton.jit  # type: ignore[untyped-decorator]
def handed_back(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """Each program writes what the one before it has read."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    own = tl.load(out + row * WIDTH + at) + 1
    tl.store(out + (row + 1) % ROWS_WRITTEN * WIDTH + at, own)


@triton.jit  # type: ignore[untyped-decorator]
def overwritten(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """The first program writes last where the others write first."""
    row, at = tl.program_id(0), tl.arange(0, WIDTH)
    for turn in range(0, 2):
        tl.store(out + ((row == 0) == (turn == 0)).to(tl.int32) * WIDTH + at, at + row * 10.0 + turn)


@triton.jit  # type: ignore[untyped-decorator]
def halves(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """What one program writes as a word, the one before it has read as the upper half of it."""
    row = tl.program_id(0)
    tl.store(out + row, tl.load(x + row))
    half = tl.load(out.to(tl.pointer_type(tl.float16)) + 3 + row * 2)
    tl.store(out + 32 + row, half.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def one_place(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """All programs write one place, and read it."""
    tl.store(out, tl.load(out) + 1)
    tl.store(out + 1 + tl.program_id(0), tl.load(out))


@triton.jit  # type: ignore[untyped-decorator]
def counted(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """An atomic operation tells each program how many came before it."""
    tl.store(out + 8 + tl.program_id(0), tl.atomic_add(out, 1.0))


@triton.jit  # type: ignore[untyped-decorator]
def read_by_all(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """All programs read what the first one writes then."""
    first = tl.load(out)
    tl.store(out + tl.program_id(0), first + tl.load(x + tl.program_id(0)))


@triton.jit  # type: ignore[untyped-decorator]
def fails(x: Any, lengths: Any, out: Any, WIDTH: tl.constexpr) -> None:
    """The third program fails after two have written."""
    row = tl.program_id(0)
    tl.store(out + row, 5.0)
    for _ in range(0, 1, 2 - row):
        tl.store(out + row, 6.0)


ROWS_WRITTEN = tl.constexpr(ROWS)
TOGETHER: dict[Any, tuple[int, ...]] = {
    branches: (ROWS, 2),
    turns: (ROWS,),
    folds: (ROWS,),
    shapes: (1, 1, ROWS),
    block_pointers: (ROWS,),
    in_place: (ROWS,),
}
APART = (handed_on, handed_back, overwritten, halves, one_place, counted, read_by_all, fails)


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each launch's runs of several programs that were not taken back."""
    found: list[int] = []
    run = side_by_side.Builder.run_together

    def watched(self: Any, *arguments: Any) -> bool:
        launch = side_by_side.Launch(arguments[-1])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(side_by_side, "Launch", lambda programs: launch)
            done: bool = run(self, *arguments)
        found.append(launch.attempts if done else 0)
        return done

    monkeypatch.setattr(side_by_side.Builder, "run_together", watched)
    forget()
    yield found
    forget()


def forget() -> None:
    side_by_side._failures.clear()
    traces._known.clear()


def left_by(
    kernel: Any, grid: tuple[int, ...], lengths: Sequence[int] = (1, 5, 3, 3, 0, 5), seed: int = 0
) -> torch.Tensor:
    """Bits of the output, where nothing else is."""
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.standard_normal((2 * ROWS + WIDTH) * WIDTH).astype(np.float32))
    out = torch.from_numpy(random.standard_normal(4 * ROWS * WIDTH).astype(np.float32))
    out = out.half() if kernel is branches else out
    try:
        kernel[grid](x, torch.tensor(lengths, dtype=torch.int32), out, WIDTH=WIDTH)
    except InterpreterError:
        out = torch.cat([out, torch.ones(1)])
    return out.view(torch.uint8)


def one_after_another(kernel: Any, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patched:
        patched.setattr(side_by_side, "enabled", False)
        patched.setattr(traces, "enabled", False)
        return left_by(kernel, grid)


@pytest.mark.parametrize("kernel", TOGETHER, ids=lambda kernel: kernel.__name__)
def test_side_by_side_the_bits_are_those_of_one_after_another(
    kernel: Any, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = left_by(kernel, TOGETHER[kernel])
    assert torch.equal(found, one_after_another(kernel, TOGETHER[kernel], monkeypatch))
    # all, four lengths, both sides of row 1, and both parts, where a row has two
    assert attempts == [13 if kernel is branches else 1]


@pytest.mark.parametrize("kernel", APART, ids=lambda kernel: kernel.__name__)
def test_where_the_order_matters_they_run_one_after_another(
    kernel: Any, attempts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = left_by(kernel, (ROWS,))
    assert torch.equal(found, one_after_another(kernel, (ROWS,), monkeypatch))
    assert attempts == [0]
    # and it is tried twice more, not for ever
    for _ in range(4):
        left_by(kernel, (ROWS,))
    assert attempts == [0] * side_by_side.MOST_FAILURES


def launch_with(lengths: list[int]) -> None:
    out = torch.zeros(2 * ROWS * WIDTH, dtype=torch.float16)
    branches[(ROWS,)](torch.zeros(999), torch.tensor(lengths, dtype=torch.int32), out, WIDTH=WIDTH)


ALIKE, UNLIKE = [3] * ROWS, list(range(ROWS))


def test_what_gains_nothing_is_not_tried_for_ever(attempts: list[int]) -> None:
    for _ in range(5):
        launch_with(UNLIKE)
    assert attempts == [7] * side_by_side.MOST_FAILURES


def test_a_launch_that_gains_makes_up_for_one_that_does_not(attempts: list[int]) -> None:
    for _ in range(5):
        launch_with(ALIKE)
        launch_with(UNLIKE)
    assert attempts == [3, 7] * 5


def test_large_blocks_run_with_fewer_lanes(attempts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "VALUES_AT_ONCE", 3 * WIDTH)
    found = left_by(in_place, (ROWS,))
    assert attempts == [3] and torch.equal(found, one_after_another(in_place, (ROWS,), monkeypatch))


def test_many_programs_run_in_parts(attempts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "LANES_AT_ONCE", 4)
    found = left_by(in_place, (ROWS,))
    assert attempts == [2] and torch.equal(found, one_after_another(in_place, (ROWS,), monkeypatch))


def test_too_much_to_remember_is_not_tried(attempts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "REMEMBERED", 8 * WIDTH)
    found = left_by(in_place, (ROWS,))
    assert attempts == [0] and torch.equal(found, one_after_another(in_place, (ROWS,), monkeypatch))


def blind(self: Any) -> bool:
    return False


def forgetful(self: Any, mark: tuple[int, int] = (0, 0)) -> None: ...


def careless(writers: Any, lanes: Any) -> bool:
    return False


HAS_ORDER = side_by_side.Place.has_order


def unread(self: Any, reads: Any) -> bool:
    return HAS_ORDER(self, [])


def unwritten(self: Any, reads: Any) -> bool:
    return HAS_ORDER(self, reads) and not HAS_ORDER(self, [])


def whole_only(self: Any, unit: int) -> Any:
    lanes = np.broadcast_to(self.lanes, self.addresses.T.shape).T
    return self.addresses[self.mask], lanes[self.mask]


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no order is seen": (side_by_side.Memory, "has_order", blind),
    "no read is compared": (side_by_side.Place, "has_order", unread),
    "no write is compared": (side_by_side.Place, "has_order", unwritten),
    "nothing is taken back": (side_by_side.Memory, "undo", forgetful),
    "who has written is not compared": (side_by_side.Place, "differ", staticmethod(careless)),
    "pieces of a word are not compared": (side_by_side.Access, "flat", whole_only),
    "a place belongs to the first lane": (side_by_side.Launch, "of_lane", lambda self: int(self.lanes[0])),
    "branches are not parted": (side_by_side, "same", lambda values: values[0].item()),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {**TOGETHER, **dict.fromkeys(APART, (ROWS,))}
    wanted = {kernel: one_after_another(kernel, grid, monkeypatch) for kernel, grid in kernels.items()}
    owner, name, changed = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, changed)
    assert any(not torch.equal(left_by(kernel, grid), wanted[kernel]) for kernel, grid in kernels.items())
