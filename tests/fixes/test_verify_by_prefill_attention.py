# SPDX-License-Identifier: Apache-2.0
"""The attention that the real backend takes for a verification, after a prefill that was left to FlashInfer."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "verify_by_prefill_attention"
BACKEND = "sglang/srt/layers/attention/trtllm_mla_backend.py"
LEFT, OWN = "FlashInfer", "TensorRT-LLM"


@pytest.mark.parametrize("release", ["0.5.11", "0.5.13", "0.5.15.post1"])
def test_a_verification_takes_the_backends_own_attention(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.verify_attention")
    assert found == {
        "applied": [FIX],
        "with": {"EXTEND": LEFT, "TARGET_VERIFY": OWN, "DRAFT_EXTEND_V2": OWN},
        "without": {"EXTEND": LEFT, "TARGET_VERIFY": LEFT, "DRAFT_EXTEND_V2": LEFT},
    }


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("forward_batch.forward_mode.is_extend()\n            and not", "not", Verdict.AFFECTED),
        ("self.forward_prefill_metadata.fallback_to_flashinfer_impl", "self.leaves_it(forward_batch)", Verdict.UNKNOWN),
    ],
)
def test_a_later_source_is_read_and_not_guessed(old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict(FIX, NEWEST, BACKEND, old, new) is verdict
