# SPDX-License-Identifier: Apache-2.0
"""The real break around a pooled indexer, in a batch that data parallel attention has padded."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import pooled_indexer_padded as fix
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten
from tests.wheels import NEWEST

FIX = declared_in(fix)
BRIDGE = "sglang/srt/layers/attention/dsa/kpool_prefill_cuda_graph.py"
REFUSED = "Pooled-indexer prefill returned an unexpected top-k shape"


@pytest.mark.parametrize("release", ["0.5.20"])
def test_a_choice_for_real_tokens_is_filled_up(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found = processes.beside(
        release_root(release), "-m", "tests.scenarios.pooled_indexer", timeout=600, **settings.only(FIX.id)
    )[0]
    assert found["applied"] == [FIX.id]
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
def test_a_later_source_is_read_and_not_guessed(
    release_root: Callable[[str], pathlib.Path], new: str, verdict: Verdict
) -> None:
    old = "not num_logical <= result.shape[0] <= n"
    assert fix.probe(Source(rewritten(release_root(NEWEST), BRIDGE, old, new))).verdict is verdict
