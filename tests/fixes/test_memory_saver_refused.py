# SPDX-License-Identifier: Apache-2.0
"""The verdict on a source whose prefill graphs can be released, and on one where they cannot."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import memory_saver_refused as fix
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests.mutated import rewritten
from tests.wheels import NEWEST

BACKEND = "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"


@pytest.mark.parametrize(
    ("new", "verdict"), [("raise NotImplementedError(", Verdict.AFFECTED), ("logger.info(", Verdict.FIXED)]
)
def test_only_a_refusal_is_told_of(release_root: Callable[[str], pathlib.Path], new: str, verdict: Verdict) -> None:
    changed = rewritten(release_root(NEWEST), BACKEND, "raise NotImplementedError(", new)
    assert fix.probe(Source(changed)).verdict is verdict
