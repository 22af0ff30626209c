# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Mamba2 in prefill batches, on a real scheduler: red, green, and releases that are right."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.fixes import settings
from tests.wheels import NEWEST

FIX = "mamba2_checkpoint_grid"
# 0.5.14 has another defect there, and tests/fixes/test_mamba2_hit_ignored.py both fixes
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19")
SERVER = {"attention_backend": "triton", "model": {"mamba_chunk_size": 64}}
OTHERS: dict[str, dict[str, Any]] = {
    "chunks of 16, pages of 16": {"model": {"mamba_chunk_size": 16}, "page_size": 16},
    "chunks of 128": {"model": {"mamba_chunk_size": 128}, "mamba_track_interval": 128},
    "pages of 128, chunks of 64": {"page_size": 128, "mamba_track_interval": 128},
    "in pieces, overlapped": {"chunked_prefill_size": 128, "disable_overlap_schedule": False},
}
# wrong are the checkpoints of prefills that are not the first of their batch and do not end at a boundary; the first
# and the fourth of the five have theirs from decode
STOCK = {
    "one": [[[192, True]]],
    "two, each turn ends in another chunk": [[[128, True], [128, False]], [[192, True], [192, False]]],
    "three": [[[64, True], [192, True], [64, False]]],
    "five around a boundary": [[[64, True], [64, True], [64, False], [64, True], [128, False]]],
}
RIGHT = {name: [[[found, True] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}
# most of what is wrong, and what is not
TELLING = ("two, each turn ends in another chunk", "five around a boundary")
ARMS = ("with", "without")
Run = Callable[..., Any]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Run:
    def run(release: str, **server: Any) -> Any:
        arguments = ("-m", "tests.scenarios.warm_answers", "falcon_h1", json.dumps(SERVER | server))
        return processes.beside(release_root(release), *arguments, timeout=600, **settings.only(FIX))[0]

    return run


@pytest.mark.forms_of(FIX)
@pytest.mark.parametrize("release", AFFECTED)
def test_a_checkpoint_is_the_state_of_its_own_prompt(run: Run, release: str, everything: bool) -> None:
    conversations = [*STOCK] if everything or release == AFFECTED[0] else [*TELLING]
    found = run(release, conversations=conversations)
    assert found["applied"] == [FIX]
    assert found["without"] == {name: STOCK[name] for name in conversations}
    assert found["with"] == {name: RIGHT[name] for name in conversations}


@pytest.mark.parametrize("server", OTHERS)
def test_pages_chunks_and_pieces_of_other_sizes(run: Run, server: str) -> None:
    found = run("0.5.16", **OTHERS[server])
    with_it, without = ([each for turns in found[arm].values() for turn in turns for each in turn] for arm in ARMS)
    assert [length for length, _ in with_it] == [length for length, _ in without]
    assert max(length for length, _ in with_it) >= 128
    assert all(right for _, right in with_it)
    assert not all(right for _, right in without)


def test_a_release_that_looks_them_up_right_is_left_as_it_is(run: Run) -> None:
    assert run(NEWEST) == {"applied": [], "without": RIGHT}
