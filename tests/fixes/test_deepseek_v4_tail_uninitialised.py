# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of DeepSeek-V4, around a backend that computes the real rows."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone

ID = "deepseek_v4_tail_uninitialised"


# before 0.5.15 the model's module imports tilelang; from 0.5.20 on the number of real rows has another name
@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.20", "0.5.21"])
def test_padded_rows_are_zero_and_real_rows_as_before(release: str) -> None:
    found = alone.found(ID, release, "tests.scenarios.deepseek_v4_tail")
    affected = release != "0.5.21"
    assert found["applied"] == ([ID] if affected else [])
    assert found["with"] == ["zero", True]
    assert found["without"] == ["nan" if affected else "zero", True]


def test_a_break_that_gives_its_rows_back_in_another_way_is_not_judged() -> None:
    old = "    output[:real_num_tokens].view(ret.shape).copy_(ret)\n    return\n"
    new = old.replace("[:real_num_tokens]", "")
    assert alone.verdict(ID, "0.5.20", "sglang/srt/models/deepseek_v4.py", old, new) is Verdict.UNKNOWN
