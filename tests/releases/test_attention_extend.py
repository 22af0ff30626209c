# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs with attention inside, against each release's own graphs and eager prefill, on the CPU."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from tests import processes
from tests.wheels import NEWEST

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

# whose capture returns the graph and the answer
ONE = "0.5.12.post1"
# a window, sinks, and slots of its own
WINDOW = ("gpt_oss", '{"dtype": "bfloat16"}')
RUN = (
    *((release, "llama") for release in (ONE, "0.5.14", "0.5.17", "0.5.20", NEWEST)),
    *((release, *WINDOW) for release in (ONE, "0.5.17", NEWEST)),
)
TOO_MANY = "one more"
LAYERS = 2


@pytest.fixture
def run(release_root: Root) -> Callable[..., Found]:
    def run(release: str, scenario: str, *arguments: str, **environment: str) -> Found:
        found: Found
        found, _ = processes.beside(
            release_root(release),
            *("-m", "tests.releases.attention_prefill", scenario, *arguments),
            environment={KERNEL.flag: "fa3", **environment},
            timeout=600,
        )
        return found

    return run


def wrong_in(report: Found) -> list[str]:
    """Name what is not as in a report of graphs with attention inside."""
    wrong = []
    if report["twins"] != [[16, 1], [8, 1]]:
        wrong.append(f"twins {report['twins']}")
    # noted for the replay with attention inside, and for the one without
    if report["left"] != {"more than 3 requests in a batch": 2}:
        wrong.append(f"left {report['left']}")
    for name, batch in report["batches"].items():
        if batch["segments"] != [LAYERS + 1 if name == TOO_MANY else 1, LAYERS + 1]:
            wrong.append(f"{name}: segments {batch['segments']}")
        if not batch["same"] or batch["as eager"] != 0.0:
            wrong.append(f"{name}: other bits")
    return wrong


@pytest.mark.parametrize("case", RUN, ids=" ".join)
def test_replays_have_no_break_and_the_bits_of_graphs_with_breaks_and_of_eager(
    run: Callable[..., Found], case: tuple[str, ...]
) -> None:
    release, *model = case
    report = run(release, "right", *model)
    assert set(report["breaks"].values()) == {LAYERS} and TOO_MANY in report["batches"]
    assert wrong_in(report) == []
