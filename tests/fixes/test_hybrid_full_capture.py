# SPDX-License-Identifier: Apache-2.0
"""The error that a capture ends with, and the verdict on a source that prepares a prefill."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests import processes, wheels
from tests.fixes import alone
from tests.wheels import NEWEST

BACKEND = "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"


@pytest.mark.parametrize("model", ["qwen3next", "falcon_h1"])
@pytest.mark.parametrize("release", ["0.5.15", "0.5.20", NEWEST])
def test_a_capture_ends(release: str, model: str) -> None:
    arguments = ("-m", "tests.scenarios.full_prefill", "hybrid", model)
    found, _ = processes.beside(wheels.unpacked(release), *arguments, SGLANG_PLUGINS="__none__")
    assert found == "list index out of range"


def test_a_source_that_prepares_a_prefill_is_not_told_of() -> None:
    old = "        self.forward_metadata = self._replay_metadata("
    new = "        if forward_batch.forward_mode.is_extend():\n            return\n" + old
    assert alone.verdict("hybrid_full_capture", NEWEST, BACKEND, old, new) is Verdict.FIXED
