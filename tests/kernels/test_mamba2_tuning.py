# SPDX-License-Identifier: Apache-2.0
"""benchmarks/mamba2_tuning.py: a tuning with other answers has no times."""

from __future__ import annotations

import pytest

from benchmarks import gdn_tuning, mamba2_tuning
from benchmarks.bench import mamba2_layer, timing
from sglang_bcg_fixes.kernels.linear_extend.walks import Walk
from sglang_bcg_fixes.kernels.mamba2_extend import triton
from tests.bench.cpu_device import Cpu, once

SHAPE = mamba2_layer.Shape(1, 2, 1, 32, 32, chunk=64)
# the interpreter runs every program of a grid, also those that find nothing to do
WALK = Walk(2, 4, 1, part=64)
FEW = triton.Tuning(WALK, (WALK,), prepare_programs=2)


def test_only_a_tuning_with_the_same_bits_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "tuning_for", lambda shape: FEW)
    monkeypatch.setattr(mamba2_tuning, "CHANGES", ({"many": {"part": 16}}, {"strip": 4}, {"few": (), "tile": 32}))
    monkeypatch.setattr(timing, "in_turn", once)
    launch = triton.Call.launch

    def wrong_with_a_strip_of_four(call: triton.Call) -> None:
        launch(call)
        if call.tuning.strip == 4:
            call.output[0, 0, 0] += 1

    monkeypatch.setattr(triton.Call, "launch", wrong_with_a_strip_of_four)
    # bfloat16's convolution is not a number in the interpreter
    rows = {row["tuning"]: row for row in mamba2_tuning.case_of(10, 2, SHAPE, Cpu(), 5, "float16")}
    assert list(rows) == ["as it is", "many part 16", "strip 4", "few none, tile 32"]
    timed = {name for name, row in rows.items() if gdn_tuning.LAYER in row}
    assert timed == {"as it is", "many part 16", "few none, tile 32"}, rows
    assert all(rows[name][what] > 0 for name in timed for what in (gdn_tuning.PREPARE, gdn_tuning.ADVANCE))
    assert rows["strip 4"]["why"] == "other bits than the tuning as it is"
