# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of prompts that running requests are mixed into, on a real scheduler: red, green, and right releases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fixes import alone, settings
from tests.wheels import NEWEST

FIX = "mixed_chunk_drops_tracking"
MIX = "sglang.srt.managers.schedule_batch:ScheduleBatch.mix_with_running"
AFFECTED = (
    *("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1"),
    *("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22"),
)
THREE, TWO = "three", "two, each turn ends in another chunk"
MIXED = {"enable_mixed_chunk": True, "chunked_prefill_size": 128, "poisoned": True}
GDN = {"attention_backend": "triton", "dtype": "float16", "conversations": [THREE]}
MAMBA2 = {"attention_backend": "triton", "model": {"mamba_chunk_size": 64}, "conversations": [TWO, THREE]}
LIGHTNING = {"conversations": [TWO, THREE]}
OVERLAPPED = {"disable_overlap_schedule": False}
# the first batch has the first prompt and a piece of the second: 1 token of 130, or 28 of 192. What follows has running
# requests in it, and a boundary is counted from the beginning of the piece
STOCK = {TWO: [[[64, True], [65, False]], [[192, True], [129, False]]], THREE: [[[64, True], [92, False], [64, False]]]}
RIGHT = {name: [[[found, True] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}
# Mamba2 layers of 0.5.14 forget every state where the mask says that there is nothing to save
NOTHING_FOUND = {name: [[[found, False] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}
# other defects of a model and a release, without which every hit is wrong
OF_THE_BATCH, LATE = "mamba2_checkpoint_grid", "lightning_checkpoint_late"
OTHERS: dict[tuple[str, str], tuple[dict[str, Any], list[str], Any]] = {
    ("falcon_h1", "0.5.14"): (MAMBA2, [OF_THE_BATCH], NOTHING_FOUND),
    ("falcon_h1", "0.5.18"): (MAMBA2 | OVERLAPPED, [OF_THE_BATCH], STOCK),
    ("falcon_h1", "0.5.22"): (MAMBA2, [], STOCK),
    ("bailing_full", "0.5.16"): (LIGHTNING, [LATE], NOTHING_FOUND),
}


def run(release: str, model: str, server: dict[str, Any], *beside: str) -> Any:
    arguments = ("tests.scenarios.warm_answers", model, json.dumps(MIXED | server))
    others = {name: flag for other in beside for name, flag in settings.only(other).items()}
    return alone.found(FIX, release, *arguments, **others)


@pytest.mark.parametrize("release", AFFECTED)
def test_prompts_that_others_are_mixed_into_save_their_states(release: str) -> None:
    found = run(release, "qwen3next", GDN)
    assert found == {"applied": [FIX], "without": {THREE: STOCK[THREE]}, "with": {THREE: RIGHT[THREE]}}


@pytest.mark.parametrize(("model", "release"), OTHERS)
def test_models_whose_states_are_saved_by_other_layers(model: str, release: str) -> None:
    server, beside, stock = OTHERS[model, release]
    found = run(release, model, server, *beside)
    assert sorted(found["applied"]) == sorted([FIX, *beside])
    assert found["without"] == stock
    assert found["with"] == RIGHT


def test_a_release_that_keeps_them_is_left_as_it_is() -> None:
    assert run(NEWEST, "qwen3next", GDN | OVERLAPPED) == {"applied": [], "without": {THREE: RIGHT[THREE]}}
