# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive around another one's boundary, on a real overlapping scheduler: red, green, right releases."""

from __future__ import annotations

import functools
import json
import types
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import boundary_counted_twice as fix
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "boundary_counted_twice"
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17")
SERVER = {
    "attention_backend": "triton",
    "model": {"mamba_chunk_size": 16},
    "mamba_track_interval": 16,
    "disable_overlap_schedule": False,
}
MIXED = {"enable_mixed_chunk": True, "chunked_prefill_size": 128}
# after how many tokens of the first request the second arrives, and how many the first has in the end. It reaches the
# boundary of 16 in the step that begins before its fourth token is known, and that of 32 before its twentieth
BOUNDARY, NEXT = 4, 20
ARRIVALS = [(2, 8), (3, 8), (BOUNDARY, 8), (5, 8), (BOUNDARY, 19), (BOUNDARY, NEXT), (BOUNDARY, 22)]
# those that are wrong, one that is not, and the one whose boundary is passed by
TELLING = [(3, 8), (BOUNDARY, 8), (BOUNDARY, 19), (BOUNDARY, 22)]


def arriving(fix: str, release: str, arrivals: list[tuple[int, int]], **server: Any) -> Any:
    """Run requests that arrive one after the other, without this fix alone and with it."""
    given = json.dumps(SERVER | server | {"arrivals": arrivals})
    return alone.found(fix, release, "tests.scenarios.arriving_requests", "falcon_h1", given)


run = functools.partial(arriving, FIX)


@pytest.mark.parametrize("release", AFFECTED)
def test_a_boundary_counts_once(release: str, everything: bool) -> None:
    arrivals = ARRIVALS if everything or release == AFFECTED[0] else TELLING
    found = run(release, arrivals)
    assert found["applied"] == [FIX]
    stock = dict(zip(arrivals, found["without"], strict=True))
    assert [arrival for arrival, (_, right) in stock.items() if not right] == [(BOUNDARY, 8), (BOUNDARY, 19)]
    mended = dict(zip(arrivals, found["with"], strict=True))
    assert all(right for _, right in mended.values())
    # the prefill in flight has a step of the first request wait, so its boundary was passed by
    assert stock[3, 8][0] == 0
    # a request that ends before a boundary leaves the checkpoint of the last one
    assert {arrival: length for arrival, (length, _) in mended.items()} == {
        arrival: 32 if arrival[1] > NEXT else 16 for arrival in arrivals
    }


def test_a_mixed_step_is_not_counted() -> None:
    found = run("0.5.17", [(3, 8), (3, 19), (4, 8)], **MIXED)
    assert found["applied"] == [FIX]
    assert found["without"] == [[16, False], [16, False], [16, True]]
    # the step at the boundary saves nothing, and there is none before
    assert found["with"] == [[0, True], [0, True], [16, True]]


@pytest.mark.parametrize("release", ["0.5.18", NEWEST])
def test_releases_that_count_it_once_are_left_as_they_are(release: str) -> None:
    found = run(release, [(3, 8), (BOUNDARY, 8)])
    assert found == {"applied": [], "without": [[16, True], [16, True]]}


@pytest.mark.parametrize(("speculates", "is_lazy"), [(True, False), (False, True), (True, True)])
def test_where_another_fix_or_none_is_for_the_boundary_sglang_finds_it(speculates: bool, is_lazy: bool) -> None:
    batch = types.SimpleNamespace(
        spec_algorithm=types.SimpleNamespace(is_none=lambda: not speculates),
        req_to_token_pool=types.SimpleNamespace(enable_mamba_extra_buffer_lazy=is_lazy),
    )
    asked = []

    def original(*args: Any) -> tuple[bool, int]:
        asked.append(args)
        return True, 16

    given = ("processor", "request", batch, "result", 0)
    assert fix.check_track_boundary(original, *given) == (True, 16)
    assert asked == [given]
