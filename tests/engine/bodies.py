# SPDX-License-Identifier: Apache-2.0
"""Bodies of the fixes of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sglang_bcg_fixes.model import Fix, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding, Verdict

TARGET = "sglang.srt.target"
KNOWN = Finding(Verdict.AFFECTED, "its places are known")
# what is changed gives a list
Original = Callable[..., list[Any]]


seen: list[Any] = []


def seen_before(*args: Any, **kwargs: Any) -> None:
    seen.append([list(args[-1:]), kwargs])


def call_target(x: Any) -> Any:
    from sglang.srt import target

    return target.function(x)


def after(result: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return [*result, "after"]


def around(original: Original, *args: Any, **kwargs: Any) -> list[Any]:
    return ["around", *original(*args, **kwargs)]


def outer(original: Original, *args: Any, **kwargs: Any) -> list[Any]:
    return ["outer", *original(*args, **kwargs)]


def replace(*args: Any, **kwargs: Any) -> list[Any]:
    return ["replaced"]


def named(original: Original, x: Any, y: Any = 1) -> list[Any]:
    return ["named", *original(x, y)]


def misnamed(original: Original, x: Any, z: Any) -> None:
    raise AssertionError("must be refused before it is called")


def break_body(original: Callable[..., None], x: Any, out: list[Any]) -> None:
    original(x, out)
    out.append("patched")


def instead_of_break(original: Callable[..., None], x: Any, out: list[Any]) -> None:
    """Go without the break where x is even."""
    if x % 2:
        original(x, out)
    else:
        out.append("captured")


def method_break_body(original: Callable[..., None], self: Any, x: Any, out: list[Any]) -> None:
    original(self, x, out)
    out.append("patched")


def point(
    path: str, how: How = How.AROUND, body: str = "around", aliases: tuple[str, ...] = (), module: str = TARGET
) -> PatchPoint:
    return PatchPoint((f"{module}:{path}",), how, f"{__name__}:{body}", aliases)


def fix(name: str, *points: PatchPoint) -> Fix:
    return Fix(id=name, doc="Test", upstream=(), probe=lambda source: KNOWN, known={}, patches=points)


def kernel(op: str, *impls: Impl, finding: Finding = KNOWN, points: Iterable[PatchPoint] = ()) -> Kernel:
    return Kernel(op, "Test", impls, lambda source: finding, {}, tuple(points))


def through_kernel(original: Original, *args: Any, **kwargs: Any) -> list[Any]:
    from sglang_bcg_fixes.kernels import active

    return [active.selected("extra_op").impl.name, *original(*args, **kwargs)]
