# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gdn_segments.py: lengths of segments that are worth a measurement, and no times for a wrong one."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest

from benchmarks import gdn_segments, gdn_tuning, gdn_variants
from benchmarks.bench import gdn_layer, timing
from sglang_bcg_fixes.kernels.gdn_extend import cuda
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from tests.bench.cpu_device import once
from tests.kernels.gdn_extend_on_host import SIGNATURES, launched, library
from tests.kernels.program_on_host import Replaying


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library(PROGRAM.file, tmp_path_factory.mktemp("on_host"), SIGNATURES)


def test_a_segment_is_short_enough_to_cut_and_long_enough_to_gain() -> None:
    found = {length: gdn_segments.segments_for([length, 5]) for length in (700, 2048, 8192, 16384)}
    assert found == {700: [0], 2048: [0, 256, 512], 8192: [0, 512, 1024, 2048], 16384: [0, 1024, 2048, 4096]}


def test_a_wrong_segment_has_no_times(right: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launched(dict.fromkeys(SIGNATURES, right))
    # without what it carries, only an output in segments is wrong
    without = dataclasses.replace(kernels, carry={kind: lambda *_: None for kind in kernels.carry})
    monkeypatch.setattr(timing, "in_turn", lambda arms, rounds, warm_up: once(arms, rounds))
    monkeypatch.setattr(gdn_segments, "SEGMENTS", (64,))
    shape = gdn_layer.Shape(1, 1, 1)
    rows: dict[str, list[dict[str, Any]]] = {}
    # what the right one has carried may still lie in memory that is used again
    for name, made in (("without", without), ("right", kernels)):
        monkeypatch.setattr(cuda, "on_device", lambda device, made=made: made)
        variant = gdn_variants.Variant("", made, [])
        rows[name] = gdn_segments.case_of("tiny", shape, [200], variant, Replaying(cuda), 5)
    assert [(row["segment"], row["verdict"], row["chosen"]) for row in rows["right"]] == [
        (0, "green", True),
        (64, "green", False),
    ]
    assert all(row[gdn_tuning.LAYER] > 0 for row in rows["right"])
    assert [row["verdict"] for row in rows["without"]] == ["green", "red"]
    assert gdn_tuning.LAYER not in rows["without"][1]
