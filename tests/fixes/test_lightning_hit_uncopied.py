# SPDX-License-Identifier: Apache-2.0
"""Prefix-cache hits of lightning attention, on a real scheduler without checkpoints: red, green, and right releases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "lightning_hit_uncopied"
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.14")
# states are cached at the end of an answer alone: the next turn finds all of the last one but the last new token
FOUND = {
    "one": [[203]],
    "two, each turn ends in another chunk": [[130, 133], [204, 207]],
    "three": [[103, 195, 73]],
    "five around a boundary": [[66, 67, 68, 64, 133]],
}
NO_BUFFER = dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), "no_buffer")


def run(release: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.warm_answers", "bailing_full", json.dumps(NO_BUFFER))


def answers(right: bool) -> dict[str, Any]:
    return {name: [[[found, right] for found in turn] for turn in turns] for name, turns in FOUND.items()}


@pytest.mark.parametrize("release", AFFECTED)
def test_a_hit_starts_from_the_state_that_was_cached(release: str) -> None:
    assert run(release) == {"applied": [FIX], "without": answers(right=False), "with": answers(right=True)}


@pytest.mark.parametrize("release", ["0.5.15.post1", NEWEST])
def test_releases_that_copy_the_state_are_left_as_they_are(release: str) -> None:
    assert run(release) == {"applied": [], "without": answers(right=True)}
