# SPDX-License-Identifier: Apache-2.0
"""The real break around a pooled indexer, in a batch that data parallel attention has padded."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "pooled_indexer_padded"
BRIDGE = "sglang/srt/layers/attention/dsa/kpool_prefill_cuda_graph.py"
REFUSED = "Pooled-indexer prefill returned an unexpected top-k shape"


@pytest.mark.parametrize("release", ["0.5.20"])
def test_a_choice_for_real_tokens_is_filled_up(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.pooled_indexer")
    assert found["applied"] == [FIX]
    assert found["with"] == {
        "as many": [0, 1, 2, 3, 4, 5, -1, -1],
        "fewer": [0, 1, 2, 3, -1, -1, -1, -1],
        "one request": [0, 1, 2, 3, 4, -1, -1, -1],
        "rows for padding too": [0, 1, 2, 3, -1, -1, -1, -1],
        "too few rows": REFUSED,
    }
    assert found["without"] == {
        "as many": [0, 1, 2, 3, 4, 5, -1, -1],
        "fewer": REFUSED,
        "one request": REFUSED,
        "rows for padding too": [0, 1, 2, 3, 4, 5, -1, -1],
        "too few rows": REFUSED,
    }


@pytest.mark.parametrize(
    ("new", "verdict"),
    [("result.shape != (n, output.shape[1])", Verdict.AFFECTED), ("not fits(result, n)", Verdict.UNKNOWN)],
)
def test_a_later_source_is_read_and_not_guessed(new: str, verdict: Verdict) -> None:
    old = "not num_logical <= result.shape[0] <= n"
    assert alone.verdict(FIX, NEWEST, BRIDGE, old, new) is verdict
