# SPDX-License-Identifier: Apache-2.0
"""Python time that the plugin adds to one prefill and one decode step, by fix.

What a fix runs is timed without what it goes on to call of SGLang's, in a replayed prefill and in a decode step.
Kernels are off: they stand in the place of SGLang's own and are measured on a GPU.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import timeit
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from cpu_sglang import graphs, one_batch
from sglang_bcg_fixes.engine import call_counts, graph_break, wrappers
from sglang_bcg_fixes.model import How

STEPS, REPEATS = 5, 10
BATCH = [6, 5]


class Clock:
    """Time by fix: each body's own, in a warm cache and without the functions of SGLang's that it goes on to call.

    A body that has run is run again with what those functions returned or raised, so that they do nothing twice.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.nanoseconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        # what has come back to each function that is being run, the innermost last
        self.returned: list[list[Callable[[], Any]]] = []
        self.given: Iterator[Callable[[], Any]] | None = None

    def timed(self, body: Callable[..., Any], fix: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                return body(*args, **kwargs)
            return self.answer(body, fix, args, kwargs)

        return functools.update_wrapper(run, body, updated=())

    def left_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                return original(*args, **kwargs)
            return self.answer(original, None, args, kwargs)

        return functools.update_wrapper(run, original, updated=())

    def answer(self, function: Callable[..., Any], fix: str | None, args: Any, kwargs: Any) -> Any:
        if self.given is not None:
            return next(self.given)()
        self.returned.append([])
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self.returned.pop()
            self.note(functools.partial(throw, error))
            raise
        returned = self.returned.pop()
        if fix is not None:
            self.calls[fix] += 1
            self.nanoseconds[fix] += min(self.again(function, args, kwargs, returned) for _ in range(REPEATS))
        self.note(lambda: result)
        return result

    def note(self, answer: Callable[[], Any]) -> None:
        if self.returned:
            self.returned[-1].append(answer)

    def again(self, function: Callable[..., Any], args: Any, kwargs: Any, returned: list[Callable[[], Any]]) -> int:
        self.given = iter(returned)
        start = perf_counter_ns()
        try:
            function(*args, **kwargs)
            return perf_counter_ns() - start
        finally:
            self.given = None

    def forget(self) -> None:
        self.nanoseconds.clear()
        self.calls.clear()


def throw(error: BaseException) -> None:
    raise error


def install(clock: Clock) -> None:
    """Have everything that the plugin applies from now on timed."""
    wrap, around, rebuild = wrappers.wrap, graph_break.around, graph_break.rebuild

    def timed_wrap(original: Any, how: How, body: Any, number: int = call_counts.NO_PLACE) -> Any:
        return wrap(clock.left_out(original), how, clock.timed(body, fix_of(number)), number)

    def timed_around(original: Any, body: Any, number: int) -> Any:
        return around(clock.left_out(original), clock.timed(body, fix_of(number)), number)

    def timed_rebuild(original: Any, body: Any, number: int = call_counts.NO_PLACE) -> Any:
        rebuilt = rebuild(original, body, number)
        # a function that becomes a break is asked for each time whether a graph is being captured
        return rebuilt if graph_break.is_product(original) else clock.timed(rebuilt, fix_of(number))

    wrappers.wrap, graph_break.around, graph_break.rebuild = timed_wrap, timed_around, timed_rebuild


def fix_of(number: int) -> str:
    return next(fix for fix, places in call_counts.TALLY.places.items() if number in places.values())


def per_call_beside_the_body() -> float:
    """Nanoseconds of a wrapper round an empty body, less what the clock finds in that body."""

    def plain(a: int, b: int, c: int, d: int) -> int:
        return a

    def empty(original: Callable[..., int], *args: int) -> int:
        return original(*args)

    def fastest(function: Callable[..., Any], number: int = 20_000) -> float:
        return min(timeit.repeat(lambda: function(1, 2, 3, 4), number=number, repeat=7)) / number * 1e9

    clock = Clock()
    watched = wrappers.wrap(clock.left_out(plain), How.AROUND, clock.timed(empty, "empty"))
    clock.is_running = True
    found = []
    for _ in range(200):
        clock.forget()
        watched(1, 2, 3, 4)
        found.append(clock.nanoseconds["empty"])
    return fastest(wrappers.wrap(plain, How.AROUND, empty)) - fastest(plain) - min(found)


def measure(loaded: one_batch.LoadedModel, clock: Clock, beside: float) -> dict[str, dict[str, list[float]]]:
    """Step -> fix -> calls and microseconds a call, in the fastest of many steps."""
    steps: dict[str, dict[str, list[float]]] = {"prefill": {}, "decode": {}}
    with noted(loaded.model_runner, clock) as notes:
        for _ in range(STEPS):
            one_batch.generate(loaded, [[3] * length for length in BATCH], 2)
    for place, (calls, nanoseconds) in enumerate(notes):
        step = steps["decode" if place % 2 else "prefill"]
        for fix, count in calls.items():
            each = max(0.0, nanoseconds[fix] / count + beside) / 1e3
            step[fix] = min(step.get(fix, [count, each]), [count, each])
    return steps


@contextlib.contextmanager
def noted(model_runner: Any, clock: Clock) -> Iterator[list[tuple[dict[str, int], dict[str, int]]]]:
    """Note the clock's counts and times of each forward."""
    notes: list[tuple[dict[str, int], dict[str, int]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        clock.forget()
        output = type(model_runner).forward(model_runner, *args, **kwargs)
        notes.append((dict(clock.calls), dict(clock.nanoseconds)))
        return output

    model_runner.forward = forward
    try:
        yield notes
    finally:
        del model_runner.forward


def serve(job: dict[str, Any], row: dict[str, Any]) -> None:
    """Fill the row with what each fix costs a model of this depth."""
    from tests.harm import forked_rows

    clock = Clock()
    beside = per_call_beside_the_body()
    install(clock)
    loaded = forked_rows.load(job)
    forked_rows.prepare(loaded.model_runner.model)
    forked_rows.captured(loaded.model_runner, forked_rows.Said())
    before = graphs.counters.replays
    clock.is_running = True
    row["steps"] = measure(loaded, clock, beside)
    row["replays"] = (graphs.counters.replays - before) // STEPS
    row["layers"] = loaded.model_runner.model_config.num_hidden_layers
