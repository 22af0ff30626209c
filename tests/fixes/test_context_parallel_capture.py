# SPDX-License-Identifier: Apache-2.0
"""The verdict on a source that takes indices which a captured batch has not, and on one that asks first."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FILE = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mla.py"
GATHERS = "            elif forward_batch.forward_mode.is_extend():\n                # for extend, gather kv\n"
ASKS = GATHERS.replace("is_extend():", "is_extend() and forward_batch.attn_dcp_metadata is not None:")


@pytest.mark.parametrize(("new", "verdict"), [(GATHERS, Verdict.AFFECTED), (ASKS, Verdict.FIXED)])
def test_only_indices_that_are_taken_unasked_are_told_of(new: str, verdict: Verdict) -> None:
    assert alone.verdict("context_parallel_capture", NEWEST, FILE, GATHERS, new) is verdict
