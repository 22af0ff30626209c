# SPDX-License-Identifier: Apache-2.0
"""Captured Kimi delta attention of tiny models on the real runner: red, green, and gates that are flat already."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.fixes import kda_raw_beta
from tests import processes
from tests.fixes import settings

FIX = "kda_raw_beta"
MODELS = ("KimiLinearForCausalLM", "KimiK3LinearForCausalLM")
# four batches are replayed in two segments each, and the last one is too small for a graph
REPLAYS, REPLAYED = 8, 4


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
@pytest.mark.parametrize("model", MODELS)
def test_replays_answer_as_the_eager_layers_do(
    release_root: Callable[[str], pathlib.Path], model: str, release: str
) -> None:
    def answers(flag: str) -> dict[str, Any]:
        scenario = ("-m", "tests.scenarios.kda_in_graph", "answers", model)
        found, _ = processes.beside(release_root(release), *scenario, timeout=600, **settings.only(FIX, flag))
        assert found["before"] == {"graphs": "disabled", "captures": 0}
        assert found["in graph"] and found["breaks"] == {"16": 1, "8": 1} and found["replays"] == REPLAYS, found
        assert found["differences"][REPLAYED:] == [0.0]
        return dict(found)

    stock, patched = answers("off"), answers("on")
    assert (stock["report"], patched["report"]) == ("off", "applied")
    assert min(stock["differences"][:REPLAYED]) > 1, stock
    assert max(patched["differences"][:REPLAYED]) < 0.01, patched


@pytest.mark.parametrize("shape", [(1, 5, 6), (1, 5, 2, 3)])
def test_the_gate_is_given_flat_and_in_the_same_memory(shape: tuple[int, ...]) -> None:
    gate, beta = torch.rand(shape), torch.rand(1, 5, 2)
    given = kda_raw_beta.with_a_flat_gate(lambda **arguments: arguments, a=gate, b=beta, layer=None)
    assert given["a"].shape == (1, 5, 6) and given["a"].data_ptr() == gate.data_ptr()
    assert given["b"] is beta and given.keys() == {"a", "b", "layer"}
    assert (given["a"] is gate) == (gate.ndim == 3)
