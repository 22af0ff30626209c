# SPDX-License-Identifier: Apache-2.0
"""A data parallel rank without requests beside one that prefills, with Qwen4's n-gram embeddings in both."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import idle_rank_unrecognised as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes
from tests.fixes import settings
from tests.wheels import NEWEST

FIX = declared_in(fix)
# whether the ranks gather tokens there: on 0.5.22 no replay gets past that
SERVERS = [("0.5.22", False), (NEWEST, False), (NEWEST, True)]


@pytest.mark.parametrize(("release", "gathers"), SERVERS)
def test_an_idle_rank_embeds_nothing_and_the_other_answers_as_eagerly(
    release_root: Callable[[str], pathlib.Path], release: str, gathers: bool
) -> None:
    environment = settings.only(FIX.id)
    if not gathers:
        environment["SGLANG_USE_ATTN_TP_NGRAM"] = "1"
    found, _ = processes.beside(release_root(release), "-m", "tests.scenarios.idle_rank", **environment)
    assert found["applied"] == [FIX.id]
    # three norms for each prompt, of its own tokens
    busy = {"replayed": True, "normed": [11] * 3 + [5] * 3, "right": [True, True]}
    assert found["with"] == [busy, {"replayed": True, "normed": [], "right": []}]
    # the other rank waits for this one
    assert found["without"][1] == "RuntimeError: CUDA error: invalid configuration argument"
