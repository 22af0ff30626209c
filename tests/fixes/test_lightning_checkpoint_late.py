# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of lightning attention, on a real scheduler: red, green, and releases that are right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fixes import alone, settings
from tests.wheels import NEWEST

FIX = "lightning_checkpoint_late"
# without it every hit is wrong in these
COPIED = "lightning_hit_uncopied"
COPIES_NOTHING = ("0.5.13", "0.5.13.post1", "0.5.14")
# its Bailing imports the CUDA-only package cutlass unguarded in 0.5.15
COPIES = ("0.5.15.post1", "0.5.16")
# by turn and by conversation: the last boundary of the prompt before it, or of its answer
EVERY_64 = {
    "one": [[192]],
    "two, each turn ends in another chunk": [[128, 128], [192, 192]],
    "three": [[64, 192, 64]],
    "five around a boundary": [[64, 64, 64, 64, 128]],
}
EVERY_128 = {
    "one": [[128]],
    "two, each turn ends in another chunk": [[128, 128], [128, 128]],
    "three": [[0, 128, 0]],
    "five around a boundary": [[0, 0, 0, 0, 128]],
}
# a boundary is counted from the beginning of a piece, and a batch has room for 128 tokens
IN_PIECES = {
    "one": [[192]],
    "two, each turn ends in another chunk": [[128, 129], [192, 129]],
    "three": [[64, 156, 64]],
    "five around a boundary": [[64, 64, 65, 64, 67]],
}
# the step that ends an answer has begun before the boundary is noted
OVERLAPPED = EVERY_64 | {
    "two, each turn ends in another chunk": [[64, 128], [192, 192]],
    "five around a boundary": [[0, 64, 64, 64, 128]],
}
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlapped": ({"disable_overlap_schedule": False}, OVERLAPPED),
    "pages of 16": ({"page_size": 16}, EVERY_64),
    "pages of 64": ({"page_size": 64}, EVERY_64),
    "pages of 128": ({"page_size": 128, "mamba_track_interval": 128}, EVERY_128),
    "chunks of 128": ({"model": {"mamba_chunk_size": 128}, "mamba_track_interval": 128}, EVERY_128),
    "in pieces": ({"chunked_prefill_size": 128}, IN_PIECES),
}
# right only where a prompt ended at a boundary, and its answer has crossed none
STOCK = {
    "one": [[[192, False]]],
    "two, each turn ends in another chunk": [[[128, False], [128, False]], [[192, False], [192, False]]],
    "three": [[[64, False], [192, True], [64, False]]],
    "five around a boundary": [[[64, False], [64, True], [64, False], [64, False], [128, False]]],
}


def run(release: str, *arguments: str, beside: str | None = None) -> Any:
    return alone.found(FIX, release, *arguments, **(settings.only(beside) if beside else {}))


def conversations(**server: Any) -> tuple[str, ...]:
    return ("tests.scenarios.warm_answers", "bailing_full", json.dumps(server))


def all_of(found: dict[str, Any], right: bool) -> dict[str, Any]:
    return {name: [[[length, right] for length in turn] for turn in turns] for name, turns in found.items()}


def found_in(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: [[length for length, _ in turn] for turn in turns] for name, turns in answers.items()}


@pytest.mark.parametrize("release", COPIES)
def test_a_hit_goes_on_from_the_state_of_its_boundary(release: str) -> None:
    answers = run(release, *conversations())
    assert answers["applied"] == [FIX]
    assert answers["without"] == STOCK
    assert answers["with"] == all_of(EVERY_64, right=True)


@pytest.mark.parametrize("release", COPIES_NOTHING)
def test_so_it_does_where_the_state_has_to_be_copied_first(release: str) -> None:
    answers = run(release, *conversations(), beside=COPIED)
    assert answers["applied"] == sorted([FIX, COPIED])
    assert answers["without"] == all_of(EVERY_64, right=False)
    assert answers["with"] == all_of(EVERY_64, right=True)


@pytest.mark.parametrize("server", SERVERS)
def test_pages_chunks_and_pieces_of_other_sizes(server: str) -> None:
    given, found = SERVERS[server]
    answers = run(COPIES[-1], *conversations(**given))
    assert answers["with"] == all_of(found, right=True)
    # where a hit is right without it, the prompt before it ended there
    assert found_in(answers["without"]) == found
    assert answers["without"]["one"] == all_of(found, right=False)["one"]


def test_a_release_that_saves_the_right_states_is_left_as_it_is() -> None:
    assert run(NEWEST, *conversations()) == {"applied": [], "without": all_of(EVERY_64, right=True)}


@pytest.mark.parametrize("release", ["0.5.14", *COPIES])
def test_a_replayed_decode_saves_states_where_the_scheduler_looks_for_them(release: str) -> None:
    found = run(release, "tests.scenarios.decode_checkpoints", "bailing_full")
    assert found["applied"] == [FIX]
    for arm, saved in (("with", True), ("without", False)):
        steps = [step for steps in found[arm].values() for step in steps]
        assert {was for step in steps for was in step["saved"]} == {saved}
        # and nowhere else than an eager decode does
        assert not any(step["wrong slots"] for step in steps)
