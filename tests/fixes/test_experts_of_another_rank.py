# SPDX-License-Identifier: Apache-2.0
"""Experts that two real ranks return for their prompts, next to those of an eager prefill."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "experts_of_another_rank"
RUNNER = "sglang/srt/model_executor/model_runner.py"
# without a replayed decode graph, with one of fewer rows than the prompt's, and with one of more than the buffer's
RIGHT = ["replayed, right"] * 3
NO_ROWS = "TypeError: unsupported operand type(s) for *: 'int' and 'NoneType'"


@pytest.mark.parametrize("release", ["0.5.16", "0.5.17", "0.5.19", "0.5.20", "0.5.22", NEWEST])
def test_a_rank_returns_the_experts_of_its_own_tokens(release: str) -> None:
    # 0.5.16 reads freed memory without the other one
    found = alone.found(FIX, release, "tests.scenarios.returned_experts", SGLANG_BCG_FIX_DP_COUNTS_FREED="on")
    assert FIX in found["applied"]
    assert found["with"] == {"data parallel attention": [RIGHT, RIGHT], "none": [RIGHT, RIGHT]}
    assert found["without"]["none"] == [RIGHT, RIGHT]
    first, second = found["without"]["data parallel attention"]
    # the first rank's are at the beginning in any case
    assert first == [NO_ROWS, *RIGHT[1:]]
    assert second[:2] == [NO_ROWS, "replayed, wrong"]
    assert second[2].startswith("RuntimeError: shape mismatch")


def test_a_source_that_looks_them_up_in_another_way_is_not_guessed() -> None:
    old = 'getattr(self.decode_cuda_graph_runner, "bs", None)'
    assert alone.verdict(FIX, NEWEST, RUNNER, old, "output.cuda_graph_batch") is Verdict.UNKNOWN
