# SPDX-License-Identifier: Apache-2.0
"""The verdict on a source whose prefill graphs can be released, and on one where they cannot."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

BACKEND = "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"


@pytest.mark.parametrize(
    ("new", "verdict"), [("raise NotImplementedError(", Verdict.AFFECTED), ("logger.info(", Verdict.FIXED)]
)
def test_only_a_refusal_is_told_of(new: str, verdict: Verdict) -> None:
    assert alone.verdict("memory_saver_refused", NEWEST, BACKEND, "raise NotImplementedError(", new) is verdict
