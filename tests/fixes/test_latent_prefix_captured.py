# SPDX-License-Identifier: Apache-2.0
"""Real runners with full prefill graphs of latent attention: batches behind a prefix, and without one."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "latent_prefix_captured"
RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py"
# without a captured prefix, and with one
RELEASES = ("0.5.16", "0.5.17", "0.5.20", "0.5.22", NEWEST)
REPLAYED, EAGER, WRONG = [1, True], [0, True], [1, False]
WITHOUT = ("no prefix", "two without")
BEHIND = ("as long a prefix", "a longer prefix", "a shorter prefix")
# a captured prefix of fewer tokens has the absorbed form
THRESHOLD = "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD"


def found(release: str, flag: str, threshold: str = "1") -> Any:
    arguments = ("tests.scenarios.full_prefill", "latent_prefixes")
    told = alone.found(FIX, release, *arguments, flag=flag, **{THRESHOLD: threshold})
    assert told["applied"] == ([FIX] if flag == "on" else [])
    return told["found"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_a_prefix_that_the_graph_does_not_take_runs_eagerly(release: str, flag: str) -> None:
    behind = EAGER if flag == "on" else WRONG
    expected = {**dict.fromkeys(WITHOUT, REPLAYED), **dict.fromkeys(BEHIND, behind)}
    assert found(release, flag) == expected


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_a_prefix_in_the_absorbed_form_is_replayed(release: str) -> None:
    assert found(release, "on", threshold="4096") == dict.fromkeys((*WITHOUT, *BEHIND), REPLAYED)


def test_a_source_that_captures_the_length_of_a_prefix_is_fixed() -> None:
    old = "        forward_batch.extend_prefix_lens_cpu = prefix_lens_cpu\n"
    new = old + "        forward_batch.seq_lens_cpu = sum(prefix_lens_cpu)\n"
    assert alone.verdict(FIX, NEWEST, RUNNER, old, new) is Verdict.FIXED
