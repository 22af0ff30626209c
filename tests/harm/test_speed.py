# SPDX-License-Identifier: Apache-2.0
"""Limits on the time that the plugin's Python adds to a step, and the clock that measures it."""

from __future__ import annotations

import time

import pytest

from sglang_bcg_fixes.engine import call_counts
from tests import wheels
from tests.harm import added_time, speed

TABLE = speed.recorded()
SOME = 200_000


def spin(nanoseconds: int) -> None:
    end = time.perf_counter_ns() + nanoseconds
    while time.perf_counter_ns() < end:
        pass


def test_every_release_is_measured() -> None:
    assert list(TABLE) == list(wheels.RELEASES)
    assert all(set(found["models"]) == set(speed.MODELS) for found in TABLE.values())


@pytest.mark.parametrize("release", TABLE)
@pytest.mark.parametrize("model", speed.MODELS)
def test_a_step_takes_little_more_than_without_the_plugin(release: str, model: str) -> None:
    steps = TABLE[release]["models"][model]
    for name, most in {"prefill": speed.PREFILL, "decode": speed.DECODE}.items():
        assert speed.total(steps[name], speed.NOT_ADDED_TO_A_STEP) <= most, steps[name]
    work = {fix: each for fix, (_, each) in steps["prefill"].items() if fix in speed.WORK_OF_A_LAYER}
    assert sum(work.values()) <= speed.LAYER, work


def test_a_body_is_timed_without_what_it_calls() -> None:
    clock, times = added_time.Clock(), []

    def original() -> int:
        times.append("original")
        spin(20 * SOME)
        return 7

    inner = clock.left_out(original)

    def body() -> int:
        times.append("body")
        spin(SOME)
        answer: int = inner()
        return answer

    outer = clock.timed(body, "a_fix")
    assert outer() == 7 and not clock.calls
    del times[:]
    clock.is_running = True
    assert outer() == 7
    assert times.count("original") == 1 and times.count("body") == 1 + added_time.REPEATS
    assert clock.calls == {"a_fix": 1} and SOME <= clock.nanoseconds["a_fix"] < 5 * SOME


def test_a_fix_inside_what_another_calls_counts_for_itself() -> None:
    clock = added_time.Clock()
    deep = clock.timed(lambda: spin(4 * SOME), "deep")
    middle = clock.left_out(lambda: deep())

    def body() -> None:
        with pytest.raises(ZeroDivisionError):
            broken()
        middle()

    def fail() -> None:
        raise ZeroDivisionError

    broken = clock.left_out(fail)
    clock.is_running = True
    clock.timed(body, "outer")()
    assert clock.calls == {"deep": 1, "outer": 1}
    assert clock.nanoseconds["deep"] >= 4 * SOME > clock.nanoseconds["outer"]


def test_calls_of_each_layer_are_told_from_those_of_a_step() -> None:
    shallow, deep = {"step": [1, 2.0], "layer": [2, 1.0]}, {"step": [1, 2.0], "layer": [4, 1.0], "half": [1, 3.0]}
    found = speed.at_full_depth(shallow, deep)
    assert found == {"step": [1, 2.0], "layer": [48, 1.0], "half": [23, 3.0]}
    assert speed.total(found, ("half",)) == 50.0


def test_an_empty_body_costs_about_what_a_wrapper_does() -> None:
    # part of it is in the body already; the clock itself is not
    assert abs(added_time.per_call_beside_the_body()) < 5_000
    assert call_counts.NO_PLACE == 0
