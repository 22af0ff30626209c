# SPDX-License-Identifier: Apache-2.0
"""Short prompts on cached prefixes of a Mamba2 model, on a real scheduler: red, green, and releases that are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fixes import alone, settings

FIX = "mamba2_hit_ignored"
# the other defect of that release, which conversations held together meet too
OF_THE_BATCH = "mamba2_checkpoint_grid"
SERVER = {"attention_backend": "triton", "model": {"mamba_chunk_size": 64}}
# each turn adds 15 tokens, or 74 where there are two turns
FOUND = {
    "one": [[192]],
    "two, each turn ends in another chunk": [[128, 128], [192, 192]],
    "three": [[64, 192, 64]],
    "five around a boundary": [[64, 64, 64, 64, 128]],
}


def run(release: str) -> Any:
    arguments = ("tests.scenarios.warm_answers", "falcon_h1", json.dumps(SERVER))
    return alone.found(FIX, release, *arguments, **settings.only(OF_THE_BATCH))


def answers(right: Callable[[str, int], bool]) -> dict[str, Any]:
    return {
        name: [[[found, right(name, row)] for row, found in enumerate(turn)] for turn in turns]
        for name, turns in FOUND.items()
    }


def test_a_short_prompt_starts_from_the_state_of_its_prefix() -> None:
    found = run("0.5.14")
    assert sorted(found["applied"]) == sorted([FIX, OF_THE_BATCH])
    # a turn of a whole chunk starts from its state, and that of the first of a batch is the right one
    assert found["without"] == answers(lambda name, row: name.startswith("two") and row == 0)
    assert found["with"] == answers(lambda name, row: True)


@pytest.mark.parametrize("release", ["0.5.13", "0.5.15"])
def test_releases_that_start_from_it_are_left_as_they_are(release: str) -> None:
    found = run(release)
    assert found["applied"] == [OF_THE_BATCH]
    assert found["with"] == answers(lambda name, row: True)
