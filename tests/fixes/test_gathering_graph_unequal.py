# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with prompts of different lengths, and graphs in which each gathers the other one's tokens."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.fixes import gathering_graph_unequal as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "gathering_graph_unequal"
RULES = "sglang/srt/model_executor/forward_batch_info.py"


@pytest.mark.parametrize("release", ["0.5.19"])
def test_graphs_that_gather_tokens_are_replayed_in_one_size(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.gathering_graph")
    assert found["applied"] == [FIX]
    # replayed, and right
    assert found["with"] == [[True, True]] * 2
    # one rank gathers 8 tokens of each and the other one 16: gloo ends one of them, and NCCL would wait
    assert found["without"].startswith("not every rank has answered")


def test_only_a_capture_that_gathers_makes_the_sizes_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fix, "CAPTURES", fix.Captures())
    # an eager batch
    fix.note()
    assert fix.tolerates(True)
    fix.capture(lambda self: None, None)
    fix.note()
    assert fix.tolerates(True)
    fix.capture(lambda self: fix.note(), None)
    assert not fix.tolerates(True)
    assert not fix.tolerates(False)


def test_a_later_release_without_the_rule_is_affected() -> None:
    old = "if get_flags().dp.prefill_graph_has_dp_gather:"
    assert alone.verdict(FIX, NEWEST, RULES, old, "if False:") is Verdict.AFFECTED
