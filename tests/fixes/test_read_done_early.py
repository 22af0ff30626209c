# SPDX-License-Identifier: Apache-2.0
"""Tables that the scheduler writes as soon as a replay's event allows: red, green, and what is left as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone

DECODE, DRAFT, SPARSE = "decode_read_done_early", "draft_read_done_early", "sparse_read_done_early"
# how often an event is recorded in a step, and whether the step gives what it gives where nothing is written
EARLY, EARLY_AND_RIGHT, LATE = [1, False], [1, True], [2, True]
# the indexer of DeepSeek-V4.1 that reads the table
TORCH = "DeepSeek-V4, in torch"


def run(release: str, fix: str, *arguments: str) -> Any:
    return alone.found(fix, release, "tests.scenarios.early_read_done", *arguments)


@pytest.mark.parametrize("release", ["0.5.14", "0.5.15", "0.5.16", "0.5.17"])
def test_a_decode_that_prepares_in_its_graph_records_its_event_after_it(release: str) -> None:
    assert run(release, DECODE, "decode", "in the graph") == {"applied": [DECODE], "with": LATE, "without": EARLY}


@pytest.mark.parametrize(("release", "fix"), [("0.5.17", DECODE), ("0.5.18", SPARSE), ("0.5.23", SPARSE)])
def test_a_decode_that_prepares_before_its_graph_keeps_the_early_event(release: str, fix: str) -> None:
    found = run(release, fix, "decode", "before it")
    assert found == {"applied": [fix], "with": EARLY_AND_RIGHT, "without": EARLY_AND_RIGHT}


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_sparse_layers_that_read_the_table_get_their_event_after_them(release: str) -> None:
    assert run(release, DECODE, "decode", "nothing") == {"applied": [DECODE], "with": LATE, "without": EARLY}


@pytest.mark.parametrize("release", ["0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_sparse_layers_that_read_the_table_end_their_reads_after_them(release: str) -> None:
    assert run(release, SPARSE, "decode", "nothing") == {"applied": [SPARSE], "with": LATE, "without": EARLY}


@pytest.mark.parametrize(
    ("release", "changed"),
    [
        ("0.5.18", ["MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend"]),
        ("0.5.20", ["MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend", "QwenSparseAttnBackend"]),
        ("0.5.21", ["MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend", "QwenSparseAttnBackend", TORCH]),
        ("0.5.22", ["MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend", "QwenSparseAttnBackend", TORCH]),
        ("0.5.23", ["MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend", "QwenSparseAttnBackend", TORCH]),
    ],
)
def test_only_sparse_backends_declare_another_end(release: str, changed: list[str]) -> None:
    found = run(release, SPARSE, "declared")
    both = found["with"], found["without"]
    assert {name for name in both[0] if both[0][name] != both[1][name]} == set(changed)
    assert all(both[0][name] == ["POST_REPLAY", "POST_REPLAY", "UNKNOWN"] for name in changed)
    assert all(found["without"][name][0] == "IN_REPLAY" for name in changed)
    # it plans outside of the graph
    assert both[0].get("MiniMaxSparseNvfp4AttnBackend", ["PRE_REPLAY"] * 3) == ["PRE_REPLAY"] * 3
    assert both[0]["TritonAttnBackend"] == ["IN_REPLAY", "IN_REPLAY", "UNKNOWN"]


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.21"])
def test_a_draft_on_flash_attention_records_its_event_after_its_graph(release: str) -> None:
    assert run(release, DRAFT, "draft") == {"applied": [DRAFT], "with": LATE, "without": EARLY}


@pytest.mark.parametrize("release", ["0.5.14", "0.5.21"])
def test_names_of_flashinfers_kernels_are_not_taken_for_backends(release: str) -> None:
    assert run(release, DECODE, "flashinfer") == []
