# SPDX-License-Identifier: Apache-2.0
"""Tokens that the real worker of n-gram speculation generates with a model that is a recurrence."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "ngram_states_uncommitted"
WORKER = "sglang/srt/speculative/ngram_worker.py"
RIGHT = {"right": True, "wrongly cached": []}


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", "0.5.13"])
def test_accepted_states_are_kept(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.ngram_states")
    assert found["applied"] == [FIX]
    # with one attention backend, and with two
    assert found["with"] == [RIGHT] * 4
    assert not any(request["right"] for request in found["without"])
    assert all(request["wrongly cached"] for request in found["without"])


def test_a_later_source_is_read_and_not_guessed() -> None:
    old = "commit_mamba_states_after_verify("
    assert alone.verdict(FIX, NEWEST, WORKER, old, "keep_mamba_states(") is Verdict.UNKNOWN
