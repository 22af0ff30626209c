# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of gated delta net with large pages, on a real scheduler: red, green, and releases that are right."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.fixes import page_larger_than_state_chunk
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "page_larger_than_state_chunk"
AFFECTED = ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18")
# in float32 the kernels refuse to run
SERVER = {"attention_backend": "triton", "dtype": "float16"}
LARGE = {"page_size": 128, "mamba_track_interval": 128}
# the first of the two has its checkpoint from decode
STOCK = {
    "one": [[[128, False]]],
    "two, each turn ends in another chunk": [[[128, True], [128, False]], [[128, True], [128, False]]],
    "three": [[[0, True], [128, False], [0, True]]],
    "five around a boundary": [[[0, True], [0, True], [0, True], [0, True], [128, False]]],
}
RIGHT = {name: [[[found, True] for found, _ in turn] for turn in turns] for name, turns in STOCK.items()}
# most of what is wrong, and what is not
TELLING = ("two, each turn ends in another chunk", "five around a boundary")


def run(release: str, **server: Any) -> Any:
    return alone.found(FIX, release, "tests.scenarios.warm_answers", "qwen3next", json.dumps(SERVER | server))


@pytest.mark.parametrize("release", AFFECTED)
def test_a_checkpoint_is_the_state_of_its_boundary(release: str, everything: bool) -> None:
    conversations = [*STOCK] if everything or release == AFFECTED[0] else [*TELLING]
    found = run(release, conversations=conversations, **LARGE)
    assert found["applied"] == [FIX]
    assert found["without"] == {name: STOCK[name] for name in conversations}
    assert found["with"] == {name: RIGHT[name] for name in conversations}


def test_with_pages_as_large_as_the_chunk_nothing_changes() -> None:
    found = run(AFFECTED[-1], page_size=64)
    assert found["applied"] == [FIX]
    assert found["with"] == found["without"]
    assert all(right for turns in found["with"].values() for turn in turns for _, right in turn)


def test_a_release_that_looks_it_up_right_is_left_as_it_is() -> None:
    assert run(NEWEST, **LARGE) == {"applied": [], "without": RIGHT}


def test_a_prompt_that_ends_at_a_boundary_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = ModuleType("sglang.srt.server_args")
    arguments.get_global_server_args = lambda: SimpleNamespace(mamba_cache_chunk_size=128)
    kernels: Any = ModuleType(page_larger_than_state_chunk.KERNELS[0])
    kernels.CHUNK_SIZE = 64
    for module in (ModuleType("sglang"), ModuleType("sglang.srt"), arguments, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # four prompts, the third of which has no checkpoint; states are kept every 64 tokens: 4, 4, 3 and 5 of them
    batch = SimpleNamespace(
        extend_seq_lens=torch.tensor([200, 256, 150, 300]),
        extend_prefix_lens=torch.tensor([128, 0, 0, 64]),
        mamba_track_seqlens=torch.tensor([328, 256, 150, 364]),
        mamba_track_mask=torch.tensor([True, True, False, True]),
    )
    slots = torch.empty(0)
    found, of_slots = page_larger_than_state_chunk.look_up((torch.empty(0), slots), None, torch.empty(0), batch)
    # the state after 128 tokens of the first, and after 256 of the fourth
    assert found.tolist() == [2, 4 + 4 + 3 + 4] and of_slots is slots
