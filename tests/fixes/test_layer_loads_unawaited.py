# SPDX-License-Identifier: Apache-2.0
"""Prefixes that the host loads while a prefill is replayed: red, green, breakable graphs and a release that waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixes import alone

FIX = "layer_loads_unawaited"
LAYERS = 2
# by the load that the batch waits for: -1 is none
NEVER = {"0": {"waited for": [], "right": False}, "2": {"waited for": [], "right": False}}
NOTHING_LOADED = {"-1": {"waited for": [], "right": True}}
STOCK = {**NEVER, **NOTHING_LOADED}
RIGHT = {**{load: {"waited for": [LAYERS - 1], "right": True} for load in NEVER}, **NOTHING_LOADED}


def run(release: str, graph: str) -> Any:
    return alone.found(FIX, release, "tests.scenarios.loaded_layers", graph)


@pytest.mark.parametrize("release", ["0.5.15", "0.5.16", "0.5.17", "0.5.19", "0.5.20", "0.5.21", "0.5.22"])
def test_a_replay_without_breaks_waits_for_the_last_layer(release: str) -> None:
    assert run(release, "whole") == {"layers": LAYERS, "applied": [FIX], "with": RIGHT, "without": STOCK}


@pytest.mark.parametrize("release", ["0.5.15", "0.5.16", "0.5.17", "0.5.19", "0.5.20"])
def test_lmcache_loads_every_layer_before_a_replay_without_breaks(release: str) -> None:
    found = run(release, "lmcache")
    every_layer = list(range(LAYERS))
    assert found["with"] == {load: {"waited for": every_layer, "right": True} for load in STOCK}
    assert found["without"] == STOCK


def test_breakable_graphs_wait_layer_by_layer_as_before() -> None:
    found = run("0.5.22", "breakable")
    by_layer = {load: {"waited for": [0, 0, 1, 1], "right": True} for load in NEVER}
    assert found == {
        "layers": LAYERS,
        "applied": [FIX],
        "with": (same := {**by_layer, **NOTHING_LOADED}),
        "without": same,
    }


def test_a_release_that_waits_is_left_as_it_is() -> None:
    assert run("0.5.23", "whole") == {"layers": LAYERS, "applied": [], "with": RIGHT, "without": RIGHT}
