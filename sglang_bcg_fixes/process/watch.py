# SPDX-License-Identifier: Apache-2.0
"""Verify patches when a graph runner is built and when the first batch arrives.

Every applied fix and kernel is then looked up again where SGLang finds it, because another plugin may have patched the
same place later. The first batch serves a process that builds no runner. Batches are counted, so that a fix that was
never reached can be told from one whose time has not come, and so are prefills that a graph was asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy import runners
from sglang_bcg_fixes.engine import call_counts
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.model import How, Patch, PatchPoint
from sglang_bcg_fixes.planning.plan import Plan

if TYPE_CHECKING:
    from sglang_bcg_fixes.process.process import Process

BATCHES = "batches"
RUNNERS = "graph_runners"
# prefills that the runner of graphs was asked for, that it replays, and that it does not
ASKED, REPLAYED, REFUSED = "asked_replays", "replayed_prefills", "refused_prefills"
_is_counting = [True]
FORWARD = f"{runners.EXECUTOR}.model_runner:ModelRunner.forward"


@dataclasses.dataclass(frozen=True)
class ReadBack:
    """The fixes found live in this process, the occasion, and the number of batches counted by then.

    The capture of a draft's graphs counts batches too, so only those after the last look are user traffic.
    """

    occasion: str
    live: list[str]
    lost: dict[str, str]
    wrapped: dict[str, list[str]]
    batches: int
    replayed: int = 0
    refused: int = 0
    time: float = dataclasses.field(default_factory=time.time)

    def agrees_with(self, earlier: ReadBack) -> bool:
        return (self.live, self.lost, self.wrapped) == (earlier.live, earlier.lost, earlier.wrapped)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "line": self.line()}

    def line(self) -> str:
        text = f"verified when {self.occasion}: {len(self.live)} live"
        if self.lost:
            text += f", LOST {', '.join(self.lost)}"
        for fix, places in self.wrapped.items():
            text += f"; {fix}: {'; '.join(places)}"
        return text


def look(occasion: str, ledger: Ledger, made: Plan) -> ReadBack:
    """Look up everything that was applied, and find what is lost."""
    applied = [decision.id for decision in made.applied if decision.id in ledger.applied()]
    problems = {name: "; ".join(ledger.read_back(name)) for name in applied}
    return ReadBack(
        occasion,
        live=[name for name, problem in problems.items() if not problem],
        lost={name: problem for name, problem in problems.items() if problem},
        wrapped={name: places for name in applied if (places := ledger.wrapped(name))},
        batches=call_counts.TALLY.sum(BATCHES),
        replayed=call_counts.TALLY.sum(REPLAYED),
        refused=call_counts.TALLY.sum(REFUSED),
    )


def hooks(process: Process) -> Iterator[Patch]:
    """The hooks for this SGLang: each is applied like a fix when its module is imported, and alone."""
    source = process.source
    for places in runners.BY_PHASE.values():
        for runner in places:
            if source.has_module(runner.partition(":")[0]):
                name = f"{RUNNERS}:{runner.partition(':')[2]}"
                yield hook(name, f"{runner}.__init__", How.AFTER, functools.partial(after_runner, process))
    if source.has_module(FORWARD.partition(":")[0]):
        yield hook(BATCHES, FORWARD, How.BEFORE, functools.partial(before_batch, process))
    for question in runners.MAY_REPLAY:
        if process.source.has_module(question.partition(":")[0]):
            numbers = [call_counts.TALLY.number(name, question) for name in (REFUSED, REPLAYED)]
            yield hook(ASKED, question, How.AFTER, functools.partial(after_question, process, numbers))


def hook(name: str, where: str, how: How, body: Callable[..., Any]) -> Patch:
    return Patch(name, (PatchPoint((where,), how, body),))


def after_runner(process: Process, result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    look_again(process, f"{type(self).__name__} was built", getattr(self, "model_runner", None))


def before_batch(process: Process, self: Any, *args: Any, **kwargs: Any) -> None:
    # what the batch before this one has reached
    call_counts.TALLY.show()
    if call_counts.TALLY.sum(BATCHES) == 1:
        look_again(process, "the first batch came", self)
        process.say_once()


def look_again(process: Process, occasion: str, model_runner: Any) -> None:
    show_metrics(process, model_runner)
    process.meet(model_runner)
    process.read_back(occasion)


def show_metrics(process: Process, model_runner: Any) -> None:
    if getattr(getattr(model_runner, "server_args", None), "enable_metrics", False):
        process.show_metrics()


def after_question(process: Process, numbers: list[int], result: bool, self: Any, *args: Any, **kwargs: Any) -> bool:
    if _is_counting[0]:
        call_counts.TALLY.counts[numbers[bool(result)]] += 1
        # it is asked of a batch, by whatever name
        if not result and (batch := next(iter((*args, *kwargs.values())), None)) is not None:
            process.metrics.count_refusal(self, batch)
    return result


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """For questions of our own, which SGLang asks once more."""
    _is_counting[0] = False
    try:
        yield
    finally:
        _is_counting[0] = True
