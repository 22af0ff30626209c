# SPDX-License-Identifier: Apache-2.0
"""Sparse layers in a prefill graph: real layer, runner, capture and replay around a backend that reads the batch."""

from __future__ import annotations

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

CAPTURED = ("0.5.16", "0.5.21")
BROKEN_OUT = (NEWEST,)


@pytest.mark.parametrize("release", (*CAPTURED, *BROKEN_OUT))
def test_sparse_layers_attend_to_the_requests_of_the_replay(release: str) -> None:
    found = alone.found("sparse_attention_captured", release, "tests.scenarios.sparse_attention")
    assert found["applied"] == ["sparse_attention_captured"] * (release in CAPTURED)
    real = [[count] * 4 + [True] for count in (11, 9, 7, 11) for _ in range(found["layers"])]
    right = {"equal": [True] * 4, "seen": real}
    # what was captured is one request: a request alone is one, too
    wrong = {"equal": [False, True, False, False], "seen": []}
    for arm, expected in {"with": right, "without": wrong if release in CAPTURED else right}.items():
        assert found[arm].pop("replays") > 0
        assert found[arm] == expected, arm
