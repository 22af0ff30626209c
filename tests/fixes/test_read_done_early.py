# SPDX-License-Identifier: Apache-2.0
"""Tables that the scheduler writes as soon as a replay's event allows: red, green, and what is left as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone

DECODE, DRAFT = "decode_read_done_early", "draft_read_done_early"
# how often an event is recorded in a step, and whether the step gives what it gives where nothing is written
EARLY, EARLY_AND_RIGHT, LATE = [1, False], [1, True], [2, True]


def run(release: str, fix: str, *arguments: str) -> Any:
    return alone.found(fix, release, "tests.scenarios.early_read_done", *arguments)


@pytest.mark.parametrize("release", ["0.5.14", "0.5.15", "0.5.16", "0.5.17"])
def test_a_decode_that_prepares_in_its_graph_records_its_event_after_it(release: str) -> None:
    assert run(release, DECODE, "decode", "in the graph") == {"applied": [DECODE], "with": LATE, "without": EARLY}


def test_a_decode_that_prepares_before_its_graph_keeps_the_early_event() -> None:
    found = run("0.5.17", DECODE, "decode", "before it")
    assert found == {"applied": [DECODE], "with": EARLY_AND_RIGHT, "without": EARLY_AND_RIGHT}


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.21"])
def test_a_draft_on_flash_attention_records_its_event_after_its_graph(release: str) -> None:
    assert run(release, DRAFT, "draft") == {"applied": [DRAFT], "with": LATE, "without": EARLY}


@pytest.mark.parametrize("release", ["0.5.14", "0.5.21"])
def test_names_of_flashinfers_kernels_are_not_taken_for_backends(release: str) -> None:
    assert run(release, DECODE, "flashinfer") == []
