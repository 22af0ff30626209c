# SPDX-License-Identifier: Apache-2.0
"""Rows of a replayed batch that hybrid models take for padding: real backends, as the decode runner calls them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

GUESSED_FOR_ALL = ("0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1")
GUESSED_FOR_LIGHTNING = ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16")
HANDED_DOWN = ("0.5.17", NEWEST)


def rows(real: int, tokens: int = 4) -> list[list[int]]:
    """The first rows have their own slots, tokens and requests, the others nobody's."""
    padding = 4 - real
    starts = [min(row, real) * tokens for row in range(5)]
    requests = [*range(1, real + 1), *[0] * padding]
    return [[request + 100 if request else -1 for request in requests], starts, requests]


RIGHT = {
    "one of length one": rows(4),
    "all of length one": rows(4),
    "one of length one, padded": rows(2),
    "padded": rows(3),
    "no request": rows(0),
    "decode": rows(3, tokens=1),
}
# one real request is lost for each that has length 1
GUESSED = RIGHT | {"one of length one": rows(3), "all of length one": rows(0), "one of length one, padded": rows(1)}
FAMILIES = ("MambaAttnBackendBase", "Mamba2AttnBackend", "LightningAttentionBackend")


def run(release: str, flag: str) -> Any:
    return alone.found("mamba_padding_miscounted", release, "tests.scenarios.mamba_padding", flag=flag)


@pytest.mark.parametrize("release", (*GUESSED_FOR_ALL, *GUESSED_FOR_LIGHTNING))
def test_without_the_fix_a_request_of_length_one_costs_the_last_one_its_state(release: str) -> None:
    guessed = FAMILIES if release in GUESSED_FOR_ALL else FAMILIES[-1:]
    expected = {family: GUESSED if family in guessed else RIGHT for family in FAMILIES}
    assert run(release, "off") == {**expected, "touched": []}


@pytest.mark.parametrize("release", (*GUESSED_FOR_ALL, *GUESSED_FOR_LIGHTNING, *HANDED_DOWN))
def test_with_the_fix_requests_keep_their_state_and_padded_rows_have_none(release: str) -> None:
    shared, lightning = release in GUESSED_FOR_ALL, release in GUESSED_FOR_LIGHTNING
    touched = FAMILIES[:1] if shared else FAMILIES[-1:] if lightning else ()
    assert run(release, "on") == {**dict.fromkeys(FAMILIES, RIGHT), "touched": list(touched)}
