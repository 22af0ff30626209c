# SPDX-License-Identifier: Apache-2.0
"""Slots of checkpoints around a prefill, on a real overlapping scheduler: red, green, and a right release."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.fixes import slots_not_exchanged
from sglang_bcg_fixes.planning.registry import declared_in
from tests.fixes.test_boundary_counted_twice import MIXED, arriving
from tests.wheels import NEWEST

FIX = "slots_not_exchanged"
AFFECTED = ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
# when the second request arrives, so that its prefill comes before or after the first one's step at the boundary of 16
BEFORE, AFTER, LATER = 3, 4, 5
# how many tokens the first one has in the end: with 20 it ends while its step at the boundary of 32 is in flight
ENDS = 20
ARRIVALS = [(BEFORE, ENDS), (AFTER, ENDS), (LATER, ENDS), (AFTER, 19), (AFTER, 22)]


run = functools.partial(arriving, FIX)


@pytest.mark.parametrize("release", AFFECTED)
def test_the_next_boundary_leaves_the_last_checkpoint_alone(release: str, everything: bool) -> None:
    # those that are wrong, and one that is not
    number = len(ARRIVALS) if everything or release == AFFECTED[0] else 3
    found = run(release, ARRIVALS[:number])
    assert found["applied"] == [FIX]
    assert found["without"] == [[16, False], [16, False], [16, True], [16, True], [32, True]][:number]
    assert found["with"] == [[16, True], [16, True], [16, True], [16, True], [32, True]][:number]


def test_a_mixed_step_exchanges_nothing() -> None:
    # the first request is at the boundary of 32 in a mixed step, and at that of 48 when it ends
    arrivals = [(19, 36), (19, 35)]
    found = run(NEWEST, arrivals, **MIXED)
    assert found == {"applied": [FIX], "without": [[16, False], [16, True]], "with": [[16, True], [16, True]]}


def test_a_release_that_exchanges_them_once_is_left_as_it_is() -> None:
    assert run("0.5.17", [(LATER, 22)]) == {"applied": [], "without": [[32, True]]}


@pytest.mark.parametrize(("is_lazy", "saved"), [(True, [True]), (False, [False]), (False, None)])
def test_slots_stay_where_nothing_was_saved_or_another_is_taken_when_it_is_needed(
    is_lazy: bool, saved: list[bool] | None
) -> None:
    pool = SimpleNamespace(
        enable_mamba_extra_buffer_lazy=is_lazy, get_mamba_ping_pong_other_idx=lambda index: 1 - index
    )
    batch = SimpleNamespace(req_to_token_pool=pool, mamba_track_mask_cpu=saved, mamba_track_buffer_indices=[0])
    request = SimpleNamespace(mamba_next_track_idx=0)
    slots_not_exchanged.exchange(None, request, batch, None, 0)
    assert request.mamba_next_track_idx == 0


@pytest.mark.parametrize("i", [0, 1])
def test_a_session_gets_the_slots_of_an_ended_turn_exchanged(i: int) -> None:
    """A session takes them from the request while the result is handled."""
    taken = []

    def handle(self: Any, req: Any, batch: Any, result: Any, i: int, logits_output: Any) -> None:
        taken.append(req.mamba_next_track_idx)
        req.mamba_next_track_idx = None

    pool = SimpleNamespace(enable_mamba_extra_buffer_lazy=False, get_mamba_ping_pong_other_idx=lambda index: 1 - index)
    batch = SimpleNamespace(
        req_to_token_pool=pool, mamba_track_mask_cpu=[i == 0, i == 1], mamba_track_buffer_indices=[0, 1]
    )
    (point,) = (
        point for point in declared_in(slots_not_exchanged).patches if point.body is slots_not_exchanged.exchange
    )
    patched = wrappers.rebuild(point.where[0], handle, point.how, slots_not_exchanged.exchange, FIX)
    patched(None, SimpleNamespace(mamba_next_track_idx=i), batch, None, i, None)
    assert taken == [1 - i]
