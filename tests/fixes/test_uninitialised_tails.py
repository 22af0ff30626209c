# SPDX-License-Identifier: Apache-2.0
"""The padded rows of attention's outputs after a real replay, where uninitialised memory is NaN."""

from __future__ import annotations

from typing import Any

import pytest

from tests import processes, wheels

ATTENTION, LINEAR = "attention_tail_uninitialised", "linear_tail_uninitialised"
# release, and which of the two fixes it needs; one for each form of the patched breaks, and where each is mended
RELEASES = {
    "0.5.11": (ATTENTION,),
    "0.5.12.post1": (ATTENTION,),
    "0.5.13.post1": (ATTENTION, LINEAR),
    "0.5.14": (ATTENTION, LINEAR),
    "0.5.15.post1": (ATTENTION, LINEAR),
    "0.5.16": (LINEAR,),
    "0.5.18": (LINEAR,),
    "0.5.19": (),
}


@pytest.mark.parametrize("release", RELEASES)
def test_padded_rows_are_zero_and_real_rows_as_before(release: str) -> None:
    # what is undone must be outermost, and the tails of single models have tests of their own
    alone = ("BREAK_POSITIONS_PADDED", "FUSED_MLA_TAIL_UNINITIALISED", "DEEPSEEK_V4_TAIL_UNINITIALISED")
    others: dict[str, Any] = {f"SGLANG_BCG_FIX_{name}": "off" for name in alone}
    # the scope is replaced before anything has imported it by name
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.padded_tails", cold=True, **others)
    needed = RELEASES[release]
    assert found["applied"] == list(needed)
    # nothing but the breaks: decode, eager and piecewise runs never call them
    assert len(found["places"]) == len(needed) and all("attention_with_output" in place for place in found["places"])
    assert all(place.partition(":")[2].startswith(("bcg_", "breakable_")) for place in found["places"])
    # why bcg_flag_not_restored is off unless asked for: scopes to capture and to replay, and never one in another
    assert len(found["scopes inside another"]) >= 4 and not any(found["scopes inside another"])
    for arm in ("with", "without"):
        assert found[arm]["equal"] and found[arm]["every row is real while capturing"], found
    assert found["with"]["real"] == found["without"]["real"]
    assert found["with"]["tails"] == {"RadixAttention": "zero", "RadixLinearAttention": "zero"}
    assert found["without"]["tails"] == {
        "RadixAttention": "nan" if ATTENTION in needed else "zero",
        "RadixLinearAttention": "nan" if LINEAR in needed else "zero",
    }
