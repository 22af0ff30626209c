# SPDX-License-Identifier: Apache-2.0
"""A process beside the fake SGLang that has loaded the plugin, and what it says of its fixes later on."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.engine.wrappers import wrap
from sglang_bcg_fixes.model import How
from tests.scenarios import debugged, named
from tests.scenarios.fake_server import FUNCTION, batch, begin, build, calls, change, line, status

OCCASIONS = {"build": build, "batch": batch}


def live_when_built() -> None:
    process = begin()
    assert process.report.read_back is None and "not verified yet" in status("-v")
    build()
    found = process.report.read_back
    assert found and found.live == ["extra_fix"] and found.lost == {} and found.wrapped == {}, found
    assert "verified when EAGLEDraftCudaGraphRunner was built: 1 live; 0 batches since" in status("-v"), status("-v")
    build()
    batch()
    again = process.report.read_back
    assert again and again.occasion == "the first batch came"


def lost(name: str) -> str:
    begin()
    change(name)
    build()
    build()
    return line()


def lost_unseen() -> None:
    begin()
    change("replaced function")
    build()
    build()


def required(occasion: str) -> None:
    begin()
    change("replaced function")
    try:
        OCCASIONS[occasion]()
    except Exception:
        # as SGLang may
        print("swallowed")


def wrapped(name: str) -> str:
    begin()
    change(name)
    build()
    return status("-v")


def subclass_takes_its_place() -> None:
    process = begin()
    from sglang.srt import target

    target.Thing = type("Thing", (target.Thing,), {})
    build()
    assert process.report.read_back and process.report.read_back.lost == {}


def comes_back() -> str:
    begin()
    from sglang.srt import target

    ours = target.function
    del target.function
    build()
    target.function = ours
    build()
    return line()


def lost_kernel() -> str:
    process = begin()
    from sglang.srt import target

    from tests.scenarios.other_plugin import replaced

    target.Thing.static(1)
    build()
    batch()
    assert process.report.read_back and "extra_op" in process.report.read_back.live, process.report.read_back
    assert "applied     extra_op, triton (1 calls): it is extra" in status("-v"), status("-v")
    target.Thing.static = staticmethod(replaced(target.Thing.static))
    build()
    build()
    return status("-v")


def nothing_hooked() -> None:
    begin()
    from sglang.srt import target
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner

    for function in (EAGLEDraftCudaGraphRunner.__init__, ModelRunner.forward):
        assert function.__code__.co_filename.startswith(os.path.dirname(target.__file__)), function


def unwatched_place() -> None:
    importlib.import_module("sglang.srt.target")
    from sglang.srt.model_executor import model_runner

    del model_runner.ModelRunner.forward
    assert plugin.load().report.state("extra_fix") == "applied"


def read_back_fails() -> None:
    process = begin()
    vars(process.ledger)["read_back"] = lambda name: 1 / 0
    build()
    assert process.report.read_back is None


def read_back_fails_later() -> list[Any]:
    process = begin()
    build()
    first = process.report.read_back
    vars(process.ledger)["read_back"] = lambda name: 1 / 0
    build()
    return [first is not None, process.report.read_back]


def counted_calls() -> None:
    begin()
    assert "extra_fix (not reached yet): it is extra" in line(), line()
    build()
    assert "extra_fix (not reached yet)" in line()
    from sglang.srt import copies

    for _ in range(3):
        copies.use(1)
    batch()
    batch()
    # shown at the beginning of a batch: seven of eight
    assert "extra_fix (7 calls): it is extra" in line(), line()
    assert calls() == {os.getpid(): {FUNCTION: 7, "sglang.srt.target:Thing.method": 0}}, calls()


def counted_by_every_body() -> None:
    begin()
    from sglang.srt import target

    for x in range(5):
        target.function(x)
    batch()
    assert calls()[os.getpid()][FUNCTION] == 5, calls()


def counted_by_a_break() -> None:
    begin()
    from sglang.srt import breaks

    breaks.graphs.capturing = True
    breaks.broken_operation(1, [])
    [replay] = breaks.graphs.breaks
    replay()
    replay()
    batch()
    captured = 0 if breaks.graphs.FORM != "enable" else 1
    found = calls()[os.getpid()]
    assert found == {"sglang.srt.breaks:broken_operation": captured + 2, "sglang.srt.breaks:forgotten": 0}, found


def never_reached() -> str:
    begin()
    importlib.import_module("sglang.srt.copies")
    build()
    for _ in range(3):
        batch()
    return status("-v")


def forked_child() -> int:
    """The calls that the parent has counted; the child prints its own and its parent's."""
    begin()
    from sglang.srt import target

    build()
    target.function(1)
    batch()
    batch()
    child = os.fork()
    if not child:
        for _ in range(100):
            target.function(1)
        batch()
        found = calls()
        print(found[os.getpid()][FUNCTION], found[os.getppid()][FUNCTION], flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    batch()
    [mine] = calls().values()
    return mine[FUNCTION]


def two_servers() -> list[int]:
    """Count the calls that this one has counted, and those of another, which knows nothing of it."""
    begin()
    build()
    batch()
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.scenarios.reading_back", "another_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout and other.stdout.readline() == b"ready\n"
    found = calls()
    counted = [found[os.getpid()][FUNCTION], found[other.pid][FUNCTION]]
    other.communicate(b"\n")
    assert other.returncode == 0 and [*calls()] == [os.getpid()]
    return counted


def another_server() -> None:
    begin()
    from sglang.srt import target

    build()
    for _ in range(40):
        target.function(1)
    batch()
    print("ready", flush=True)
    input()


def unknown_counts() -> str:
    process = begin()
    build()
    descriptor = process.report.as_dict()["reached"]["descriptor"]
    os.close(descriptor)
    # somebody else's by now
    assert os.open("/dev/zero", os.O_RDONLY) == descriptor
    return line()


def compiled() -> None:
    """Compile functions that are patched in every way."""
    traced(How.BEFORE, lambda x: None)
    traced(How.AFTER, lambda result, x: result)
    traced(How.AROUND, lambda original, x: original(x))
    traced(How.REPLACE, lambda x: x + 1)


def traced(how: How, body: Callable[..., Any]) -> None:
    import torch

    place = call_counts.TALLY.number("a_fix", str(how))
    patched = wrap(lambda x: x + 1, how, body, place)
    twice = torch.compile(lambda x: 2 * patched(x), backend="eager", fullgraph=True)
    assert twice(torch.ones(2)).tolist() == [4.0, 4.0]
    assert call_counts.TALLY.counts[place] == 0, how
    patched(torch.ones(2))
    # a counter that is compiled into it would have it compiled again now, and fail
    with torch.compiler.set_stance("fail_on_recompile"):
        assert twice(torch.ones(2)).tolist() == [4.0, 4.0]
    assert call_counts.TALLY.counts[place] == 1, how


if __name__ == "__main__":
    debugged.show()
    named.run(globals())
