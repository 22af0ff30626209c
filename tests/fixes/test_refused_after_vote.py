# SPDX-License-Identifier: Apache-2.0
"""Two real ranks that vote on a prefill graph which one of them refuses to replay for its batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import refused_after_vote as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "refused_after_vote"
# that batch, and the next one of plain prompts
RIGHT = [[["eager", True], ["replayed", True]]] * 2
VOTE = "sglang/srt/managers/scheduler_components/dp_attn.py"
RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.21", "0.5.22"])
def test_all_ranks_prefill_eagerly_where_one_of_them_must(release: str) -> None:
    batch = "embeddings" if release < "0.5.19" else "long context"
    found = alone.found(FIX, release, "tests.scenarios.refused_graph", batch)
    assert found["applied"] == [FIX]
    assert found["with"] == {batch: RIGHT}
    # one rank gathers 11 tokens of each and the other one 16: gloo ends one of them, and NCCL would wait
    assert found["without"][batch].startswith("not every rank has answered")


@pytest.mark.parametrize("is_extend", [True, False])
def test_only_a_prefill_has_new_tokens(is_extend: bool) -> None:
    """A decode batch keeps what it extended when it was a prefill, and that says nothing of it now."""
    asked: list[Any] = []

    def backend_can_run(batch: Any) -> bool:
        asked.append(batch.extend_seq_lens_cpu)
        return True

    runner = SimpleNamespace(_backend_can_run_prefill_cuda_graph=backend_can_run)
    mode = SimpleNamespace(is_extend=lambda: is_extend)
    batch = SimpleNamespace(forward_mode=mode, extend_lens=[5], seq_lens_cpu=[9])
    assert fix.is_short_enough(runner, batch)
    assert asked == [[5] if is_extend else None]


@pytest.mark.parametrize(
    ("release", "path", "old", "new", "verdict"),
    [
        ("0.5.17", VOTE, "replace_embeds=None", "replace_embeds=local_batch.replace_embeds", Verdict.FIXED),
        (NEWEST, RUNNER, "(self.max_context_size, self.max_seq_len)", "(self.max_context_size,)", Verdict.AFFECTED),
        ("0.5.21", RUNNER, "not backend_can_run(forward_batch)", "False", Verdict.FIXED),
    ],
)
def test_a_later_source_is_read_and_not_guessed(release: str, path: str, old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict(FIX, release, path, old, new) is verdict
