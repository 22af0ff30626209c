# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between two pages of the prefix cache, on a real scheduler: red and green, and others that stay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import state_between_pages as fix
from tests.fixes import alone, settings, test_mixed_chunk_drops_tracking
from tests.wheels import NEWEST

FIX, MIXED = "state_between_pages", "mixed_chunk_drops_tracking"
LONG = "four chunks beside another"
# the second prompt has chunks of 16, 127 and 127 tokens: it is saved at 16 + 64, and between two pages at 143 + 64
SERVER = {**test_mixed_chunk_drops_tracking.MIXED, "page_size": 16, "conversations": [LONG]}
GDN = {"attention_backend": "triton", "dtype": "float16"}
RIGHT, WRONG = {LONG: [[[64, True], [80, True]]]}, {LONG: [[[64, True], [320, False]]]}


def run(release: str, architecture: str, **server: Any) -> Any:
    arguments = ("tests.scenarios.warm_answers", architecture, json.dumps(SERVER | server))
    found = alone.found(FIX, release, *arguments, **settings.only(MIXED))
    assert FIX in found["applied"] and found["with"] == RIGHT
    return found["without"]


@pytest.mark.parametrize("release", ["0.5.11", "0.5.15.post1"])
def test_earlier_servers_go_on_and_answer(release: str) -> None:
    assert "page_aligned_len" in run(release, "qwen3next", **GDN)["asserts"]


@pytest.mark.parametrize("release", ["0.5.16", "0.5.18", "0.5.19", NEWEST])
def test_a_key_is_as_long_as_its_state(release: str) -> None:
    assert run(release, "qwen3next", **GDN) == WRONG


def test_states_of_other_layers() -> None:
    assert run(NEWEST, "falcon_h1", attention_backend="triton", model={"mamba_chunk_size": 64}) == WRONG


@pytest.mark.parametrize(("place", "left"), [(128, 128), (144, 144), (143, None), (None, None)])
@pytest.mark.parametrize("own", [True, False])
def test_only_a_place_between_pages_is_forgotten(place: int | None, left: int | None, own: bool) -> None:
    batch = SimpleNamespace(tree_cache=SimpleNamespace(page_size=16))
    saved = SimpleNamespace(mamba_last_track_seqlen=place)
    entry = object()
    assert fix.forget_a_place_between_pages(entry, batch, saved if own else SimpleNamespace(kv=saved)) is entry
    assert saved.mamba_last_track_seqlen == left
