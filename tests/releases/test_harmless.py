# SPDX-License-Identifier: Apache-2.0
"""The statements of `sglang_bcg_fixes/cli/harmless.py`, on real releases."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.wheels import NEWEST

Run = Callable[[str, str], Any]


def found_by(module: str, scenario: str, root: pathlib.Path) -> Any:
    return processes.beside(root, "-m", f"tests.scenarios.{module}", scenario, SGLANG_PLUGINS="__none__")[0]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Run:
    return lambda release, scenario: found_by("harmless_conditions", scenario, release_root(release))


@pytest.mark.parametrize("release", ["0.5.11", NEWEST])
def test_an_idle_batch_reaches_no_linear_layer(run: Run, release: str) -> None:
    found = run(release, "idle_layers")
    attention, mlp = found["bailing"]
    assert not attention and mlp
    assert found.get("minicpm") == (None if release == "0.5.11" else [False, [0, 8]])


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.15.post1"])
def test_padded_rows_of_a_draft_extend_store_to_nobodys_slot(run: Run, release: str) -> None:
    found = run(release, "draft_rows")
    expected = {"request": 4, "length": 1, "host length": 1, "slots": [0] * 3, "real": list(range(100, 109))}
    assert found["multi"] == expected, "the request is the earlier one's"
    if release == "0.5.12.post1":
        assert found["single"] == expected


def test_an_idle_batch_clears_the_mask_of_checkpoints(run: Run) -> None:
    assert run(NEWEST, "mask_of_checkpoints") == {
        "full": [True] * 4,
        "idle": [False] * 4,
        "padded": [True, True, False, False],
    }


@pytest.mark.parametrize("release", ["0.5.20", NEWEST])
def test_a_layer_with_an_indexer_gets_the_metadata_of_full_attention(run: Run, release: str) -> None:
    # 7 is in no list: a draft's
    assert run(release, "indexer") == ["full 1 batch", "full 3 batch", "full 7 batch"]


@pytest.fixture(scope="module")
def large_bucket(release_root: Callable[[str], pathlib.Path]) -> Any:
    return found_by("harmless_replays", "large_bucket", release_root("0.5.15.post1"))


def test_a_graph_larger_than_the_context_is_right_for_several_requests(large_bucket: Any) -> None:
    assert large_bucket["context"] < 256
    assert large_bucket["replayed"] and large_bucket["equal"]


def test_the_mask_of_padding_changes_the_experts_of_padded_rows_only(large_bucket: Any) -> None:
    assert large_bucket["of tokens"] and large_bucket["of padding"] == [-1]


@pytest.fixture(scope="module")
def hybrid_runner(release_root: Callable[[str], pathlib.Path]) -> Any:
    return found_by("harmless_replays", "hybrid_runner", release_root("0.5.18"))


def test_a_new_request_does_not_see_what_is_in_its_state_slot(hybrid_runner: Any) -> None:
    assert hybrid_runner["poisoned"] and hybrid_runner["equal"]


def test_a_pipeline_stage_captures_no_prefill_graph(hybrid_runner: Any) -> None:
    assert hybrid_runner["outcome"].endswith("captured nothing: SGLang's log says why")
