# SPDX-License-Identifier: Apache-2.0
"""A tiny Sarvam with latent attention under breakable graphs, with and without the fix."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "expanded_form_captured"
ERRORS = {"0.5.18": "is invalid for input of size", "0.5.21": "is invalid for input of size", NEWEST: "einsum()"}


def replayed(release: str, *arguments: str, flag: str = "on") -> dict[str, Any]:
    told: tuple[dict[str, Any], str] = alone.logged(
        FIX, release, "tests.scenarios.expanded_form", *arguments, flag=flag
    )
    return told[0]


@pytest.mark.parametrize("release", ERRORS)
def test_replays_give_the_eager_tokens_and_the_first_one_ends_the_server_without(release: str) -> None:
    found, stock = replayed(release), replayed(release, flag="off")
    assert found["applied"] and found["replays"] and found["same"] == [True] * 3, found
    # the two forms round differently, in float16 and with logits of about 2
    assert all(0 < off < 0.005 for off in found["off"]), found
    assert not stock["applied"] and not stock["same"] and ERRORS[release] in stock["error"], stock


def test_off_cuda_the_expanded_form_is_still_captured() -> None:
    found = replayed(NEWEST, "--off-cuda")
    # of the form of eager prefill, which has no prefix here
    assert found["applied"] and found["replays"] and found["same"] == [True] * 3 and not any(found["off"]), found


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17"])
def test_the_releases_before_need_no_fix(release: str) -> None:
    found = replayed(release, flag="auto")
    assert not found["applied"] and found["replays"] and found["same"] == [True] * 3 and not any(found["off"]), found
