# SPDX-License-Identifier: Apache-2.0
"""LFM2's prompts behind a prefix of them, on real runners: red, green, and releases that are right."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_bcg_fixes.fixes import short_conv_prefix_ignored
from sglang_bcg_fixes.fixes.short_conv_prefix_ignored import probe
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = declared_in(short_conv_prefix_ignored)

ONE = "0.5.11"
LFM2, LFM2_MOE = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
FILE = "sglang/srt/models/lfm2.py"
# of logits of about one, in half precision
NEAR, FAR = 0.02, 0.05


def run(release: str, architecture: str = LFM2) -> Any:
    return alone.found(FIX.id, release, "tests.scenarios.convolution_windows", architecture)


def assert_as_in_one_piece(found: Any) -> None:
    assert all(off < NEAR for off in found["behind"].values()), found
    assert all(off < NEAR for off in found["side by side"].values()) and found["decoded"] < NEAR, found


@pytest.mark.parametrize("architecture", [LFM2, LFM2_MOE])
def test_a_prompt_goes_on_behind_its_prefix(architecture: str) -> None:
    found = run(ONE, architecture)
    assert found["applied"] == [FIX.id]
    without = found["without"]
    assert all(off > FAR for off in without["behind"].values()) and without["side by side"]["behind"] > FAR, found
    # who has no prefix is answered alike
    assert without["side by side"]["fresh"] < NEAR
    assert_as_in_one_piece(found["with"])


@pytest.mark.parametrize("release", ["0.5.12", "0.5.17", NEWEST])
def test_releases_that_tell_the_convolution_are_left_as_they_are(release: str) -> None:
    found = run(release)
    assert found["applied"] == []
    assert_as_in_one_piece(found["without"])


def test_a_release_with_one_of_them_mended_is_patched_in_the_other_alone() -> None:
    half = alone.changed(ONE, FILE, "has_initial_state=None", "has_initial_state=has_prefix")
    assert probe(half).verdict.value == "affected"
    assert [point.needed(half) for point in FIX.patches] == [False, True]
    whole = Source(Folder(wheels.unpacked(ONE)))
    assert [point.needed(whole) for point in FIX.patches] == [True, True]


def test_a_layer_that_convolves_otherwise_is_unknown() -> None:
    other = alone.verdict("short_conv_prefix_ignored", ONE, FILE, "causal_conv1d_fn(", "another_convolution(")
    assert other.value == "unknown"
