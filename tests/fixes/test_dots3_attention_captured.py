# SPDX-License-Identifier: Apache-2.0
"""A tiny Dots3 where breakable prefill graphs are chosen, with and without the fix, and other models beside it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "dots3_attention_captured"
RELEASES = ("0.5.19", "0.5.21", NEWEST)
EXPANDED = {"0.5.19": "is invalid for input of size", "0.5.21": "is invalid for input of size", NEWEST: "einsum()"}


def served(release: str, flag: str, module: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The findings, and the log."""
    return alone.logged(FIX, release, module, *arguments, flag=flag)


@pytest.mark.parametrize("layers", ["full,sliding", "sliding,full"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_first_replay_ends_the_server_without_and_nothing_is_captured_with(release: str, layers: str) -> None:
    found, log = served(release, "on", "tests.scenarios.dots3", layers)
    stock, stock_log = served(release, "off", "tests.scenarios.dots3", layers)
    assert found["applied"] and "captured nothing" in found["capture"], found
    assert found["right"] == [True] * 3 and not found["replays"] and "error" not in found, found
    assert log.count(f"bcg-fixes {FIX}: no prefill graphs for sglang.srt.models.dots3") == 1
    # the tables of the dummy batch are freed, and hold no index any more
    error = EXPANDED[release] if layers.startswith("full") else "is out of bounds"
    assert not stock["applied"] and stock["replays"] and not stock["right"] and error in stock["error"], stock
    assert f"bcg-fixes {FIX}:" not in stock_log


@pytest.mark.parametrize("release", RELEASES)
def test_other_models_keep_their_graphs(release: str) -> None:
    found, log = served(release, "on", "tests.scenarios.expanded_form", "--off-cuda")
    # Sarvam has latent attention, too
    assert found["replays"] and found["same"] == [True] * 3, found
    assert f"bcg-fixes {FIX}:" not in log
