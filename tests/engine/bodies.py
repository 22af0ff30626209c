"""What the fixes of these tests do."""

from __future__ import annotations

from sglang_bcg_fixes.model import Fix, How, Impl, Kernel, PatchPoint
from sglang_bcg_fixes.source.finding import Finding, Verdict

TARGET = "sglang.srt.target"


seen: list = []


def seen_before(*args, **kwargs):
    seen.append([list(args[-1:]), kwargs])


def call_target(x):
    from sglang.srt import target

    return target.function(x)


def after(result, *args, **kwargs):
    return [*result, "after"]


def around(original, *args, **kwargs):
    return ["around", *original(*args, **kwargs)]


def outer(original, *args, **kwargs):
    return ["outer", *original(*args, **kwargs)]


def replace(*args, **kwargs):
    return ["replaced"]


def named(original, x, y=1):
    return ["named", *original(x, y)]


def misnamed(original, x, z):
    raise AssertionError("must be refused before it is called")


def break_body(original, x, out):
    original(x, out)
    out.append("patched")


def method_break_body(original, self, x, out):
    original(self, x, out)
    out.append("patched")


def point(path, how=How.AROUND, body="around", aliases=(), module=TARGET):
    return PatchPoint((f"{module}:{path}",), how, f"{__name__}:{body}", aliases)


def fix(name, *points):
    return Fix(id=name, doc="Test", upstream=(), probe=lambda source: None, known={}, patches=points)


KNOWN = Finding(Verdict.AFFECTED, "its places are known")


def kernel(op, *impls: Impl, finding=KNOWN, points=()):
    return Kernel(op, "Test", impls, lambda source: finding, {}, tuple(points), {})


def through_kernel(original, *args, **kwargs):
    from sglang_bcg_fixes.kernels import active

    return [active.selected("extra_op").impl.name, *original(*args, **kwargs)]
