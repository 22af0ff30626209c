# SPDX-License-Identifier: Apache-2.0
"""States that the scheduler copies beside a step in flight, on a real scheduler: red, green, and a right release."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import state_copied_too_early as fix
from tests.fixes import alone

FIX = "state_copied_too_early"
AFFECTED = ("0.5.11", "0.5.12", "0.5.12.post1")
SERVER = {
    "attention_backend": "triton",
    "dtype": "float16",
    "chunked_prefill_size": 128,
    "disable_overlap_schedule": False,
    "conversations": ["one", "three"],
}
# the second of three prompts has a piece of 28 tokens in the first batch, and one of 128 in the next. The checkpoint of
# that is copied before the rest of 36 tokens is computed
STOCK = {"one": [[[192, True]]], "three": [[[64, True], [156, False], [64, True]]]}
RIGHT = {name: [[[found, True] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}


def run(release: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.late_writes", "qwen3next", json.dumps(SERVER))


@pytest.mark.parametrize("release", AFFECTED)
def test_a_copy_waits_for_the_step_that_writes_the_state(release: str) -> None:
    assert run(release) == {"applied": [FIX], "without": STOCK, "with": RIGHT}


def test_a_release_that_copies_on_the_stream_of_the_layers_is_left_as_it_is() -> None:
    assert run("0.5.13") == {"applied": [], "without": RIGHT}


@pytest.mark.parametrize(("overlaps", "has_states"), [(False, True), (True, False), (False, False)])
def test_without_overlap_or_states_nothing_waits(overlaps: bool, has_states: bool) -> None:
    pool = types.SimpleNamespace(device="cpu") if has_states else None
    of_requests = types.SimpleNamespace(mamba_pool=pool)
    fix.tell_the_pool(
        None, types.SimpleNamespace(req_to_token_pool=of_requests, enable_overlap=overlaps, forward_stream="stream")
    )
    assert pool is None or fix.STREAM not in vars(pool)
