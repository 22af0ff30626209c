# SPDX-License-Identifier: Apache-2.0
"""The error that a capture ends with, and the verdict on a source that makes the buffer."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.fixes import flashinfer_window_capture as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests import processes, wheels
from tests.fixes import alone
from tests.wheels import NEWEST

BACKEND = "sglang/srt/layers/attention/flashinfer_backend.py"
RELEASES = tuple(f"0.5.{number}" for number in ("15", "15.post1", "16", "17", "18", "19", "20", "21", "22", "23"))
MISSING = "'FlashInferAttnBackend' object has no attribute 'cuda_graph_swa_out_cache_loc'"


@pytest.mark.parametrize("release", RELEASES)
def test_a_capture_ends_where_the_cache_has_a_window(release: str) -> None:
    arguments = ("-m", "tests.scenarios.window_capture", "capture")
    found, _ = processes.beside(wheels.unpacked(release), *arguments, SGLANG_PLUGINS="__none__")
    assert found == {"plain": "prepared", "window": MISSING}


def test_a_source_that_makes_the_buffer_is_not_told_of() -> None:
    for new, verdict in ((fix.FILL, Verdict.AFFECTED), ("self.slots_of(forward_mode)[n:].zero_()", Verdict.FIXED)):
        assert alone.verdict("flashinfer_window_capture", NEWEST, BACKEND, fix.FILL, new) is verdict
