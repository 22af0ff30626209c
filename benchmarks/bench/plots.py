# SPDX-License-Identifier: Apache-2.0
"""Plots of measured rows, where matplotlib is installed."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from benchmarks.bench import gdn_layer
from benchmarks.bench.rows import GREEN, HOT, Row

HOW_TO_GET_THEM = "no plots: pip install matplotlib, then python -m benchmarks.bench --plot-only"
# a replay's time on the wall is its time on the device
LINES = (
    (gdn_layer.EAGER, gdn_layer.WALL, "o--", "launched by the host, wall"),
    (gdn_layer.CAPTURED, gdn_layer.DEVICE, "s-", "captured, device"),
)


def draw(rows: Sequence[Row], folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Draw all plots and return the files written; ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    good, written = [row for row in rows if row.verdict == GREEN and row.median], []
    for shape in dict.fromkeys(row.shape for row in good):
        written.append(folder / f"{stem}-layer-{shape}.png")
        save(layer_figure(pyplot, [row for row in good if row.shape == shape], shape), written[-1])
    return written


def save(figure: Any, file: pathlib.Path) -> None:
    figure.tight_layout()
    # a legend may stand below the panels
    figure.savefig(file, dpi=120, bbox_inches="tight")
    figure.clear()


def layer_figure(pyplot: Any, rows: Sequence[Row], shape: str) -> Any:
    """Plot one panel per number of sequences: microseconds over tokens, with the p20 to p80 band."""
    counts = sorted({row.sequences for row in rows})
    figure, panels = pyplot.subplots(1, len(counts), figsize=(4 * len(counts), 4), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], counts, strict=True):
        mine = [row for row in rows if row.sequences == count and row.l2 == HOT]
        kernels = list(dict.fromkeys(row.arm.rpartition(", ")[0] for row in mine))
        for (number, kernel), (mode, measured, style, label) in itertools.product(enumerate(kernels), LINES):
            taken = [row for row in mine if (row.arm, row.measured) == (f"{kernel}, {mode}", measured)]
            line(panel, taken, style, f"{kernel}, {label}", f"C{number}")
        floors = {row.tokens: row.details["floor_us"] for row in mine if row.details.get("floor_us")}
        if floors:
            panel.plot(*zip(*sorted(floors.items()), strict=True), "k:", label="floor")
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=f"{shape}, sequences: {count}")
        marked_tokens(panel, {row.tokens for row in mine})
    panels[0][0].set_ylabel("microseconds a layer")
    labels = panels[0][0].get_legend_handles_labels()
    figure.legend(*labels, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 0))
    return figure


def marked_tokens(panel: Any, tokens: Collection[int]) -> None:
    """Label the axis with the measured sizes instead of powers of ten."""
    panel.set_xticks(sorted(tokens), map(str, sorted(tokens)))
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def line(panel: Any, rows: Sequence[Row], style: str, label: str, colour: str) -> None:
    if rows:
        tokens, medians, low, high = zip(*sorted((r.tokens, r.median, r.p20, r.p80) for r in rows), strict=True)
        panel.plot(tokens, medians, style, label=label, markersize=4, color=colour)
        panel.fill_between(tokens, low, high, alpha=0.2, color=colour)
