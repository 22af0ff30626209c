# SPDX-License-Identifier: Apache-2.0
"""Slots and answers after a retracted thinking request has ended, on a real scheduler: red and green."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import thinking_freed_in_cache as fix
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "thinking_freed_in_cache"
ROOM = 300
# the scenario asks for checkpoints of states otherwise
NO_BUFFER = dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), "no_buffer")
LLAMA = {"attention_backend": "torch_native", **NO_BUFFER}
FALCON_H1 = {"attention_backend": "triton", "model": {"mamba_chunk_size": 16}, "mamba_track_interval": 16}


def run(release: str, flag: str, model: str = "llama") -> Any:
    server = {**(LLAMA if model == "llama" else FALCON_H1), "strip_thinking_cache": True}
    return alone.found(FIX, release, "tests.scenarios.retracted_thinking", model, json.dumps(server), flag=flag)


@pytest.mark.parametrize("release", ["0.5.11", "0.5.15.post1", "0.5.17", "0.5.20", "0.5.21"])
def test_slots_of_the_cache_are_not_freed(release: str) -> None:
    assert not all(run(release, "off")["right"])
    assert run(release, "on") == {"applied": [FIX], "slots": ROOM, "right": [True] * 3}


@pytest.mark.parametrize("release", ["0.5.22", NEWEST])
def test_the_server_goes_on(release: str) -> None:
    assert "cache_protected_len=150, len(new_indices)=60" in run(release, "off")["ends"]
    assert run(release, "on") == {"applied": [FIX], "slots": ROOM, "right": [True] * 3}


@pytest.mark.parametrize("release", ["0.5.22", NEWEST])
def test_slots_of_a_hybrid_model_have_one_owner(release: str) -> None:
    # 84 are those of the thinking that the request came back with, as far as there is a checkpoint of it
    assert run(release, "off", "falcon_h1")["slots"] == ROOM + 84
    assert run(release, "on", "falcon_h1") == {"applied": [FIX], "slots": ROOM, "right": [True] * 3}


@pytest.mark.parametrize(("cached", "length"), [(60, 60), (61, 100)])
@pytest.mark.parametrize("is_early", [True, False])
def test_only_a_key_that_the_cache_has_more_of_is_whole(cached: int, length: int, is_early: bool) -> None:
    held = SimpleNamespace(kv_committed_len=100, cache_protected_len=cached)
    request = held if is_early else SimpleNamespace(kv=held)
    assert fix.key_with_what_is_cached(lambda self: 60, request) == length
