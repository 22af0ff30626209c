# SPDX-License-Identifier: Apache-2.0
"""The table of Mamba2's times in docs/kernels.md is what was recorded."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang_bcg_fixes.kernels.mamba2_extend import Shape, triton
from sglang_bcg_fixes.lab.bench import mamba2_layer
from tests import processes

PAGE = (processes.REPOSITORY / "docs" / "kernels.md").read_text()
SECTION = " ".join(PAGE.partition("## Mamba2")[2].partition("## Lightning")[0].split())
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
STEPS = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (8192, 4), (8192, 64), (16384, 1))
SHAPES = {"Nemotron-H-8B": "nemotron_h_8b", "Falcon-H1-7B": "falcon_h1_7b"}
SGLANG, BEFORE, NOW = "sglang, captured", "bcg_fixes triton, captured", "as it is"

Times = dict[tuple[str, int, int], dict[str, float]]


def of_a_layer() -> Times:
    found: Times = {}
    for line in (RESULTS / "bench-0.5.15.post1-mamba2.jsonl").read_text().splitlines()[1:]:
        row: dict[str, Any] = json.loads(line)
        assert row["verdict"] == "green"
        if row["measured"].startswith("device") and row["l2"] == "hot":
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["arm"]] = row["median"]
    return found


def of_tunings() -> Times:
    found: Times = {}
    for row in json.loads((RESULTS / "mamba2_tuning.json").read_text())["rows"]:
        # some need more shared memory than there is
        if "layer_us" in row:
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["tuning"]] = row["layer_us"]
    return found


def test_the_table_and_its_range_are_recorded() -> None:
    layer, tunings = of_a_layer(), of_tunings()
    lines = PAGE.splitlines()
    for title, shape in SHAPES.items():
        start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title}, SGLang |"))
        rows = (lambda case: layer[case][SGLANG], lambda case: layer[case][BEFORE], lambda case: tunings[case][NOW])
        for line, of in zip(lines[start : start + 3], rows, strict=True):
            cells = [cell.strip(" *") for cell in line.strip("|").split("|")][1:]
            told = {step: cell for step, cell in zip(STEPS, cells, strict=True) if cell}
            assert told == {step: f"{of((shape, *step)):,.0f}" for step in told}, (title, line)
            assert len(told) >= 6
    gains = [layer[case][SGLANG] / each[NOW] for case, each in tunings.items() if case in layer]
    said = re.search(r"It is (\S+) to (\d+) times as fast at the (\d+) points that both have", SECTION)
    assert said and said.groups() == (f"{min(gains):.1f}", f"{max(gains):.0f}", str(len(gains)))
    assert f"Every one of {len(layer)} points is within 1.1 times" in SECTION


def most_of_few(shape: Shape) -> int:
    return max((walk.most_sequences(shape) for walk in triton.tuning_for(shape).few), default=0)


def test_what_the_walks_of_few_sequences_gain_and_cost_is_recorded() -> None:
    alone, too_many = [], []
    for (shape, _, sequences), each in of_tunings().items():
        if "few none" in each:
            share = each[NOW] / each["few none"]
            few = most_of_few(mamba2_layer.SHAPES[shape].of_kernel)
            alone += [share] if sequences == 1 else []
            too_many += [share] if sequences > few else []
    assert len(alone) == 15 and len(too_many) == 9
    assert f"One sequence takes {min(alone):.2f} to {max(alone):.2f} of the time without them." in SECTION
    costs = f"they cost {100 * (min(too_many) - 1):.0f} to {100 * (max(too_many) - 1):.0f} %"
    assert costs in SECTION
