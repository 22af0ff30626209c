# SPDX-License-Identifier: Apache-2.0
"""Real ranks that capture and replay prefill graphs of sizes which their attention group does not divide."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.fixes import unequal_token_shares as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone, settings
from tests.wheels import NEWEST

FIX = "unequal_token_shares"
ODD, EVEN, ALONE, WITHOUT = (
    "groups of two, odd sizes",
    "groups of two, even sizes",
    "groups of one",
    "no data parallel attention",
)
# before, no rank votes for a replay where decode graphs are off, as they are here
REPLAYS_FROM = "0.5.16"
ROUNDED_FROM = "0.5.22"
RUNNER, BATCH = (
    f"sglang/srt/model_executor/{name}.py" for name in ("runner/prefill_cuda_graph_runner", "forward_batch_info")
)


def right(release: str, ranks: int, sizes: list[int], votes: bool = True) -> list[dict[str, Any]]:
    return [{"sizes": sizes, "replayed": release >= REPLAYS_FROM or not votes, "right": True}] * ranks


@pytest.mark.parametrize("release", ["0.5.14", "0.5.16", "0.5.18", "0.5.19", "0.5.21", "0.5.22", NEWEST])
@pytest.mark.parametrize("flag", ["off", "on"])
def test_ranks_capture_and_replay_the_same_sizes(release: str, flag: str) -> None:
    found = alone.found("dp_counts_freed", release, "tests.scenarios.token_shares", **settings.only(FIX, flag))
    odd = found.pop(ODD)
    assert found == {
        EVEN: right(release, 4, [6, 16]),
        ALONE: right(release, 2, [5, 7, 11]),
        WITHOUT: right(release, 2, [5, 7, 11], votes=False),
    }
    if flag == "on":
        assert odd == right(release, 4, [6, 8, 12])
    elif release >= ROUNDED_FROM:
        # one rank replays the graph of 12 tokens and the other one that of 6
        assert odd.startswith("not every rank has answered")
    else:
        assert len(odd) == 4 and all("outputShape[0] * worldSize == inputShape[0]" in told for told in odd)


def test_a_size_is_rounded_down_only_where_it_would_not_fit() -> None:
    assert fix.multiples([4, 12, 20, 28, 32, 500], 8, 500) == [8, 16, 24, 32, 496]
    assert fix.multiples([4, 12, 20, 28, 32, 500], 1, 500) == [4, 12, 20, 28, 32, 500]
    # as SGLang has them, which leaves out what does not fit
    assert fix.multiples([8, 512], 8, 500) == [8, 512]
    assert fix.multiples([4], 8, 7) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "verdict"),
    [
        (RUNNER, "= get_prefill_num_tokens_to_capture(capture_tokens)", "= sorted(capture_tokens)", Verdict.AFFECTED),
        (RUNNER, "= get_prefill_num_tokens_to_capture(capture_tokens)", "= choose(capture_tokens)", Verdict.UNKNOWN),
        (BATCH, "<= max(prefill_cg.bs)", "<= self.largest_size()", Verdict.FIXED),
    ],
)
def test_a_later_source_is_read_and_not_guessed(path: str, old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict(FIX, NEWEST, path, old, new) is verdict
