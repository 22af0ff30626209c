# SPDX-License-Identifier: Apache-2.0
"""A data parallel rank without requests beside one that prefills, with Qwen4's n-gram embeddings in both."""

from __future__ import annotations

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "idle_rank_unrecognised"
# whether the ranks gather tokens there: on 0.5.22 no replay gets past that
SERVERS = [("0.5.22", False), (NEWEST, False), (NEWEST, True)]


@pytest.mark.parametrize(("release", "gathers"), SERVERS)
def test_an_idle_rank_embeds_nothing_and_the_other_answers_as_eagerly(release: str, gathers: bool) -> None:
    environment = {} if gathers else {"SGLANG_USE_ATTN_TP_NGRAM": "1"}
    found = alone.found(FIX, release, "tests.scenarios.idle_rank", **environment)
    assert found["applied"] == [FIX]
    # three norms for each prompt, of its own tokens
    busy = {"replayed": True, "normed": [11] * 3 + [5] * 3, "right": [True, True]}
    assert found["with"] == [busy, {"replayed": True, "normed": [], "right": []}]
    # the other rank waits for this one
    assert found["without"][1] == "RuntimeError: CUDA error: invalid configuration argument"
