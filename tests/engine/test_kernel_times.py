# SPDX-License-Identifier: Apache-2.0
"""The table of Mamba2's times in docs/kernels.md is what was recorded."""

from __future__ import annotations

import json
import re
from typing import Any

from tests import processes

PAGE = (processes.REPOSITORY / "docs" / "kernels.md").read_text()
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
STEPS = ((256, 1), (1024, 1), (4096, 1), (8192, 1), (16384, 1), (8192, 16))
SHAPES = {"Nemotron-H-8B": "nemotron_h_8b", "Falcon-H1-7B": "falcon_h1_7b"}
SGLANG, OURS = "sglang, captured", "bcg_fixes triton, captured"


def recorded() -> dict[tuple[str, int, int], dict[str, float]]:
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for line in (RESULTS / "bench-0.5.17-mamba2.jsonl").read_text().splitlines()[1:]:
        row: dict[str, Any] = json.loads(line)
        assert row["verdict"] == "green"
        if row["measured"].startswith("device") and row["l2"] == "hot":
            found.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["arm"]] = row["median"]
    return found


def test_the_table_and_its_range_are_recorded() -> None:
    times = recorded()
    lines = PAGE.splitlines()
    for title, shape in SHAPES.items():
        start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title}, SGLang |"))
        for line, arm in zip(lines[start : start + 2], (SGLANG, OURS), strict=True):
            cells = [cell.strip(" *") for cell in line.strip("|").split("|")][1:]
            assert cells == [f"{times[shape, tokens, sequences][arm]:,.0f}" for tokens, sequences in STEPS], (
                title,
                arm,
            )
    gains = [each[SGLANG] / each[OURS] for each in times.values()]
    said = re.search(r"It is (\S+) to (\d+) times as fast at these (\d+) points", PAGE)
    assert said and said.groups() == (f"{min(gains):.1f}", f"{max(gains):.0f}", str(len(gains)))


def test_the_chosen_tuning_is_never_slower_where_it_was_timed() -> None:
    rows = json.loads((RESULTS / "mamba2_tuning.json").read_text())["rows"]
    steps: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        # what was timed twice is compared within the later run
        steps.setdefault((row["shape"], row["tokens"], row["sequences"]), {})[row["tuning"]] = row["layer_us"]
    chosen = "tile 64, strip 16, prepare_programs 2112"
    shares = [each[chosen] / each["as it was"] for each in steps.values() if chosen in each]
    said = re.search(r"take (\d) to (\d) % off a layer", PAGE)
    assert said and len(shares) == 14
    assert said.groups() == (f"{100 * (1 - max(shares)):.0f}", f"{100 * (1 - min(shares)):.0f}")
