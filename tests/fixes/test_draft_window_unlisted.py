# SPDX-License-Identifier: Apache-2.0
"""Draft models with sliding windows on a release's own Triton backend and kernels."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.scenarios.draft_extend_extent import ACCEPTED
from tests.wheels import NEWEST

FIX = "draft_window_unlisted"
BACKEND = "sglang/srt/layers/attention/triton_backend.py"
# both sides compute in 32 bits; without the window they are a tenth and more apart
TOLERANCE = 1e-5
# until 0.5.12.post1 the graph attends to the new tokens twice, which is another fix's
COUNTED_ONCE = {"SGLANG_BCG_FIX_DRAFT_EXTEND_CACHE_EXTENT": "on"}


# the list is made by another function, or from other arguments, in each of them
@pytest.mark.parametrize(
    "release", ["0.5.11", "0.5.12.post1", "0.5.13", "0.5.15", "0.5.17", "0.5.19", "0.5.20", "0.5.22", NEWEST]
)
def test_a_layer_with_a_window_attends_to_it_in_the_graph(release: str) -> None:
    beside = COUNTED_ONCE if release < "0.5.13" else {}
    found = alone.found(FIX, release, "tests.scenarios.window_drafts", **beside)
    is_right = release == NEWEST
    assert (FIX in found["applied"]) is not is_right
    for step in found["without" if is_right else "with"].values():
        assert step["eager"] < TOLERANCE
        assert step["graph"] < TOLERANCE
    if not is_right:
        for name, step in found["without"].items():
            # the worker of old for topk above 1
            assert "NoneType" in step["eager"] if name in ACCEPTED else step["eager"] < TOLERANCE
            assert "NoneType" in step["graph"]
        assert (found["without"].keys() >= ACCEPTED.keys()) is (release in ("0.5.11", "0.5.12.post1"))


def test_a_list_made_in_another_way_is_not_judged() -> None:
    kept, cut = "    token_to_kv_pool=None,", "\n    window_kv_indices=None,"
    assert alone.verdict(FIX, "0.5.22", BACKEND, kept + cut, kept) is Verdict.UNKNOWN
