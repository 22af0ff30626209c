# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gdn_tuning.py: a tuning with other answers, or none, has no times."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import gdn_tuning
from benchmarks.bench import gdn_layer, timing
from sglang_bcg_fixes.kernels.gdn_extend import triton
from tests.bench.cpu_device import Cpu, once

SHAPE = gdn_layer.Shape(layers=1, key_heads=1, value_heads=2, head=32)
# the interpreter runs every program of a grid, also those that find nothing to do
few = functools.partial(triton.Tuning, prepare_programs=2, advance_programs=2)


def test_only_a_tuning_with_the_same_bits_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ({"advance_stages": 1}, {"advance_stages": 2}, {"strip": 5})
    monkeypatch.setattr(gdn_tuning, "Tuning", few)
    monkeypatch.setattr(triton, "Tuning", few)
    monkeypatch.setattr(triton, "FOR_FEW_ROWS", {"advance_stages": 1})
    monkeypatch.setattr(gdn_tuning, "CHANGES", changes)
    monkeypatch.setattr(timing, "in_turn", once)
    launch = triton.Call.launch

    def wrong_with_two_stages(call: triton.Call) -> None:
        launch(call)
        if call.tuning.advance_stages == 2:
            call.output[0, 0, 0] += 1

    monkeypatch.setattr(triton.Call, "launch", wrong_with_two_stages)
    rows = {row["tuning"]: row for row in gdn_tuning.case_of(10, 2, SHAPE, Cpu(), 5)}
    assert list(rows) == [
        "as it is",
        "advance_stages 1",
        "advance_stages 2",
        "strip 5",
        "chosen",
        gdn_tuning.FEW_TABLES,
    ]
    timed = {name for name, row in rows.items() if gdn_tuning.LAYER in row}
    assert timed == {"as it is", "advance_stages 1", "chosen", gdn_tuning.FEW_TABLES}
    assert all(rows[name][what] > 0 for name in timed for what in (gdn_tuning.PREPARE, gdn_tuning.ADVANCE))
    assert rows["advance_stages 2"]["why"] == "other bits than the tuning as it is"
    assert rows["strip 5"]["verdict"] == "red" and rows["strip 5"]["why"]


@pytest.mark.parametrize("states", gdn_layer.STATES)
def test_states_are_of_the_type_asked_for_and_right(monkeypatch: pytest.MonkeyPatch, states: str) -> None:
    held: list[torch.dtype] = []
    monkeypatch.setattr(gdn_tuning, "Tuning", few)
    monkeypatch.setattr(triton, "Tuning", few)
    monkeypatch.setattr(gdn_tuning, "CHANGES", ())
    monkeypatch.setattr(timing, "in_turn", once)
    launch = triton.Call.launch

    def noting(call: triton.Call) -> None:
        held.append(call.state.dtype)
        launch(call)

    monkeypatch.setattr(triton.Call, "launch", noting)
    rows = gdn_tuning.case_of(10, 2, SHAPE, Cpu(), 5, states=states)
    assert {row["verdict"] for row in rows} == {"green"}, rows
    assert {str(each) for each in held} == {f"torch.{states}"}
