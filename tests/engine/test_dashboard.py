# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard that travels with the package asks for nothing that nobody shows."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

import sglang_bcg_fixes
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process import metrics
from tests.engine.test_alerts import MATCHER

FILE = pathlib.Path(sglang_bcg_fixes.__file__).with_name("grafana_dashboard.json")
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = DASHBOARD["panels"]
# SGLang's own; tests/releases/test_read_back.py looks for it in the releases
PASSES = "sglang:cuda_graph_passes_total"
LABELS = {
    metrics.STATES: {"fix", "state", "process", "instance"},
    metrics.FALLBACKS: {"reason", "process", "instance"},
    PASSES: {"mode", "instance"},
}
SELECTOR = re.compile(r"((?:sglang)[\w:]+)(?:\{([^}]*)\})?")


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_a_panel_asks_for_metrics_and_labels_that_exist(expression: str) -> None:
    asked = SELECTOR.findall(expression)
    assert asked
    for name, matchers in asked:
        labels = {label for label, _, _ in MATCHER.findall(matchers)}
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", expression) for label in found.split(", ")}
        assert name in LABELS and labels | grouped <= LABELS[name], expression
        assert 'instance=~"$instance"' in matchers


def test_each_metric_has_a_panel_and_no_panel_covers_another() -> None:
    assert {name for expression in expressions() for name, _ in SELECTOR.findall(expression)} == LABELS.keys()
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) and all(panel["description"] for panel in PANELS)


def test_a_kernel_that_cannot_run_is_no_fault() -> None:
    operations = "|".join(kernel.op for kernel in registry.discover().kernels)
    [missing] = [expression for expression in expressions() if "blocked" in expression]
    assert f'fix!~"{operations}"' in missing
