# SPDX-License-Identifier: Apache-2.0
"""The lazy strategy around a boundary, on a real overlapping scheduler: red, green, and releases that are right."""

from __future__ import annotations

import functools
import json

import pytest

from tests.fixes import alone
from tests.fixes.test_boundary_counted_twice import BOUNDARY, MIXED, NEXT, SERVER, arriving
from tests.wheels import NEWEST

FIX = "lazy_boundary_missed"
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17")
# before 0.5.16, and since
LAZY = dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), "extra_buffer_lazy")
# the request that arrives one token earlier has a prefill in flight when the step at the boundary is processed
ARRIVALS = [(BOUNDARY - 1, 8), (BOUNDARY, 8), (BOUNDARY, 19), (NEXT - 1, 24), (NEXT, 24)]
# the step at the boundary behind a prompt of 127 tokens is in flight when the prompt is cached
BEHIND_A_PROMPT = "two, each turn ends in another chunk"
GDN = {
    "attention_backend": "torch_native",
    "dtype": "float16",
    "disable_overlap_schedule": False,
    "conversations": [BEHIND_A_PROMPT],
    "poisoned": True,
}


run = functools.partial(arriving, FIX)


@pytest.mark.parametrize("release", AFFECTED)
def test_a_boundary_is_found_where_a_prompt_arrives_beside_it(release: str) -> None:
    found = run(release, ARRIVALS, **LAZY)
    assert found["applied"] == [FIX]
    # the first has no state before that boundary, and so none is wrong
    assert found["without"] == [[0, True], [16, True], [16, True], [16, False], [32, True]]
    assert found["with"] == [[16, True], [16, True], [16, True], [32, True], [32, True]]


@pytest.mark.parametrize("release", AFFECTED)
def test_a_prompt_that_ends_before_a_boundary_keeps_its_state(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.warm_answers", "qwen3next", json.dumps(GDN | LAZY))
    assert found["applied"] == [FIX]
    assert found["without"] == {BEHIND_A_PROMPT: [[[64, False], [128, True]], [[192, False], [192, True]]]}
    assert found["with"] == {BEHIND_A_PROMPT: [[[128, True], [128, True]], [[192, True], [192, True]]]}


@pytest.mark.parametrize("release", [AFFECTED[0], AFFECTED[-1]])
def test_a_mixed_step_is_not_counted(release: str) -> None:
    found = run(release, [(3, 8), (3, 19), (19, 35), (4, 8)], **LAZY, **MIXED)
    assert found["applied"] == [FIX]
    assert found["without"] == [[16, False], [16, False], [32, False], [16, True]]
    # the step at the boundary saves nothing, and only the third has a state from before
    assert found["with"] == [[0, True], [0, True], [16, True], [16, True]]


@pytest.mark.parametrize("release", [AFFECTED[0], AFFECTED[-1]])
def test_a_state_that_a_step_in_flight_overwrites_is_not_cached(release: str) -> None:
    # the second answer ends in the step before a boundary, the last one in the step at it
    given = json.dumps(SERVER | LAZY | {"arrivals": [(2, 8), (2, NEXT), (BOUNDARY, NEXT + 2), (2, BOUNDARY + 1)]})
    program = ("tests.scenarios.arriving_requests", "falcon_h1", given)
    found = alone.found(FIX, release, *program, SGLANG_TEST_MAMBA_LAZY_ALLOC_FAIL="1")
    assert found["applied"] == [FIX]
    assert found["with"] == found["without"] == [[16, True], [0, True], [32, True], [16, True]]


@pytest.mark.parametrize("release", ["0.5.18", NEWEST])
def test_releases_that_remember_the_slot_are_left_as_they_are(release: str) -> None:
    found = run(release, [(BOUNDARY, 8), (NEXT - 1, 24)], **LAZY)
    assert found == {"applied": [], "without": [[16, True], [32, True]]}
