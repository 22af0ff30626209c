# SPDX-License-Identifier: Apache-2.0
"""A tiny diffusion LLM whose batches replay prefill graphs, with and without the fix."""

from __future__ import annotations

import pytest

from tests.fixes import alone, settings
from tests.wheels import NEWEST

FIX = "full_logits_dropped"
PROGRAM = "tests.scenarios.diffusion_replay"
# one of each way to make the answer, and of each schedule
WAYS = {("0.5.12", "together"), ("0.5.13", "together"), ("0.5.14", "together"), ("0.5.16", "together")} | {
    (NEWEST, "together"),
    (NEWEST, "apart"),
}


@pytest.mark.parametrize("release,schedule", sorted(WAYS))
def test_replays_give_the_eager_tokens_and_the_first_one_ends_the_server_without(release: str, schedule: str) -> None:
    found = alone.found(FIX, release, PROGRAM, schedule)
    assert found == {"applied": True, "same": True, "answered": True, "replays": found["replays"]} and found["replays"]
    stock = alone.found(FIX, release, PROGRAM, schedule, flag="off")
    assert "'NoneType' object" in stock["error"] and stock["answered"] and not stock["applied"], stock


def test_both_fixes_of_the_answer_stand_each_other() -> None:
    found = alone.found(FIX, "0.5.14", PROGRAM, "together", **settings.only("customized_info_dropped"))
    assert found["same"] and found["replays"], found
