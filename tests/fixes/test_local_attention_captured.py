# SPDX-License-Identifier: Apache-2.0
"""Real runners with full prefill graphs of local layers: prompts within their chunk, and beyond it."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "local_attention_captured"
BACKEND = "sglang/srt/layers/attention/flashattention_backend.py"
# of each way in which a release asks whether a batch may be replayed
RELEASES = ("0.5.15", "0.5.16", "0.5.17", "0.5.20", "0.5.22", NEWEST)
REPLAYED, EAGER, WRONG = [1, True], [0, True], [1, False]
WITHIN = ("within", "of the chunk", "two of the chunk", "within behind a prefix")
BEYOND = ("beyond", "one of two beyond", "beyond behind a prefix")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_only_what_lies_within_the_chunk_is_replayed(release: str, flag: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.full_prefill", "chunks", flag=flag)
    assert found["applied"] == ([FIX] if flag == "on" else [])
    beyond = EAGER if flag == "on" else WRONG
    assert found["found"] == {**dict.fromkeys(WITHIN, REPLAYED), **dict.fromkeys(BEYOND, beyond)}


def test_a_source_that_plans_for_local_layers_is_fixed() -> None:
    old = "m.max_seq_len_k = self.max_context_len"
    new = f"{old}; m.local_attn_metadata = self.local_attn_builder.build()"
    assert alone.verdict(FIX, NEWEST, BACKEND, old, new) is Verdict.FIXED
