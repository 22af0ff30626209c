# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kda_tuning.py: a tuning with other answers has no times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import gdn_tuning, kda_extend, kda_tuning
from sglang_bcg_fixes.kernels.kda_extend import Shape, triton

SHAPE = Shape(2, 32, 32, 4)


def test_only_a_tuning_with_the_same_bits_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter runs every program of a grid, also those that find nothing to do
    monkeypatch.setattr(triton, "tuning_for", lambda rows: triton.Tuning(prepare_programs=2, advance_programs=2))
    monkeypatch.setattr(kda_extend, "MOST_SEQUENCES", 2)
    launch = triton.Call.launch

    def wrong_with_a_strip_of_four(call: triton.Call) -> None:
        launch(call)
        if call.tuning.strip == 4:
            call.output[0, 0, 0] += 1

    monkeypatch.setattr(triton.Call, "launch", wrong_with_a_strip_of_four)
    changes = ({"part": 16}, {"strip": 4}, {"prepare_programs": 3})

    def run_twice(work: Callable[[], object]) -> float:
        work()
        work()
        return 1.0

    # bfloat16's convolution is not a number in the interpreter
    found = kda_tuning.case_of(10, 2, SHAPE, changes, torch.float16, "cpu", run_twice)
    rows = {row["tuning"]: row for row in found}
    assert list(rows) == ["as it is", "part 16", "strip 4", "prepare_programs 3"]
    timed = {name for name, row in rows.items() if gdn_tuning.LAYER in row}
    assert timed == {"as it is", "part 16", "prepare_programs 3"}, rows
    assert rows["strip 4"]["why"] == "other bits than the tuning as it is"
