# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek whose prefill is said to be by fa4, with and without the fix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "fa4_form_captured"
ERRORS = {"0.5.18": "is invalid for input of size", NEWEST: "einsum()"}


def answered(release: str, *arguments: str, flag: str = "on") -> tuple[dict[str, Any], str]:
    return alone.logged(FIX, release, "tests.scenarios.fa4_form", *arguments, flag=flag)


@pytest.mark.parametrize("release", ERRORS)
def test_no_graph_is_captured_and_the_first_replay_ends_the_server_without(release: str) -> None:
    (found, said), (stock, _) = answered(release), answered(release, flag="off")
    assert found["applied"] and "captured nothing" in found["capture"] and not found["replays"], found
    assert found["same"] == [True] * 3 and "bcg-fixes fa4_form_captured: no prefill graphs for" in said
    assert not stock["applied"] and not stock["same"] and ERRORS[release] in stock["error"], stock


@pytest.mark.parametrize("argument", ["--blackwell", "--fa3"])
def test_where_the_absorbed_form_is_captured_replays_stay(argument: str) -> None:
    found, said = answered(NEWEST, argument)
    assert found["applied"] and found["replays"] and found["same"] == [True] * 3, found
    assert "no prefill graphs for" not in said
