# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of DeepSeek-V4, around a backend that computes the real rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import deepseek_v4_tail_uninitialised as fix
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.fixes import settings
from tests.mutated import rewritten

ID = "deepseek_v4_tail_uninitialised"


# before 0.5.15 the model's module imports tilelang; from 0.5.20 on the number of real rows has another name
@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.20", "0.5.21"])
def test_padded_rows_are_zero_and_real_rows_as_before(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found, _ = processes.beside(release_root(release), "-m", "tests.scenarios.deepseek_v4_tail", **settings.only(ID))
    affected = release != "0.5.21"
    assert found["applied"] == ([ID] if affected else [])
    assert found["with"] == ["zero", True]
    assert found["without"] == ["nan" if affected else "zero", True]


def test_a_break_that_gives_its_rows_back_in_another_way_is_not_judged(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    changed = rewritten(
        release_root("0.5.20"),
        "sglang/srt/models/deepseek_v4.py",
        "    output[:real_num_tokens].view(ret.shape).copy_(ret)\n    return\n",
        "    output.view(ret.shape).copy_(ret)\n    return\n",
    )
    assert fix.probe(Source(changed)).verdict is Verdict.UNKNOWN
