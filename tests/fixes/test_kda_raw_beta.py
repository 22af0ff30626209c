# SPDX-License-Identifier: Apache-2.0
"""Captured Kimi delta attention of tiny models on the real runner: red, green, and gates that are flat already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpu_sglang import architectures
from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.fixes import kda_raw_beta
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source import releases, served
from tests import processes, wheels
from tests.fixes import alone

FIX = "kda_raw_beta"
MODELS = ("KimiLinearForCausalLM", "KimiK3LinearForCausalLM")
# four batches are replayed in two segments each, and the last one is too small for a graph
REPLAYS, REPLAYED = 8, 4


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
@pytest.mark.parametrize("model", MODELS)
def test_replays_answer_as_the_eager_layers_do(model: str, release: str) -> None:
    def answers(flag: str) -> dict[str, Any]:
        found = alone.found(FIX, release, "tests.scenarios.kda_in_graph", "answers", model, flag=flag)
        assert found["before"] == {"graphs": "disabled", "captures": 0}
        assert found["in graph"] and found["breaks"] == {"16": 1, "8": 1} and found["replays"] == REPLAYS, found
        assert found["differences"][REPLAYED:] == [0.0]
        return dict(found)

    stock, patched = answers("off"), answers("on")
    assert (stock["report"], patched["report"]) == ("off", "applied")
    assert min(stock["differences"][:REPLAYED]) > 1, stock
    assert max(patched["differences"][:REPLAYED]) < 0.01, patched


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
def test_one_rule_keeps_such_graphs_from_default_flags(release: str) -> None:
    """Without it, as pull request 39495 would have it, they have the graphs whose replays are compared above."""
    scenario = ("-m", "tests.scenarios.kda_in_graph", "by_default", *MODELS)
    found, _ = processes.beside(wheels.unpacked(release), *scenario, timeout=600)
    assert found["as it is"] == dict.fromkeys(MODELS, "off: KDA hybrid linear attention")
    assert found["without the rule"] == dict.fromkeys(MODELS, "breakable")


@pytest.mark.parametrize(
    ("model", "graphs", "asks", "concerned"),
    [
        ("KimiLinearForCausalLM", served.IF_ASKED_FOR, False, False),
        ("KimiLinearForCausalLM", served.IF_ASKED_FOR, True, True),
        ("KimiLinearForCausalLM", served.BY_DEFAULT, False, True),
        ("KimiLinearForCausalLM", "", False, True),
        ("KimiLinearForCausalLM", served.NEVER, True, False),
        ("Glm5NextForConditionalGeneration", served.BY_DEFAULT, False, False),
    ],
)
def test_whom_it_concerns(model: str, graphs: str, asks: bool, concerned: bool) -> None:
    config = {**architectures.CONFIGURATIONS["KimiLinearForCausalLM"].config, "architectures": [model]}
    options = {"--cuda-graph-backend-prefill": ("breakable",)} if asks else {}
    launch = Launch(releases.in_folder(wheels.unpacked(wheels.NEWEST)), config, options, graphs=graphs)
    assert any(concern.touches(launch) for concern in declared_in(kda_raw_beta).concerns) == concerned


@pytest.mark.parametrize("shape", [(1, 5, 6), (1, 5, 2, 3)])
def test_the_gate_is_given_flat_and_in_the_same_memory(shape: tuple[int, ...]) -> None:
    gate, beta = torch.rand(shape), torch.rand(1, 5, 2)
    given = kda_raw_beta.with_a_flat_gate(lambda **arguments: arguments, a=gate, b=beta, layer=None)
    assert given["a"].shape == (1, 5, 6) and given["a"].data_ptr() == gate.data_ptr()
    assert given["b"] is beta and given.keys() == {"a", "b", "layer"}
    assert (given["a"] is gate) == (gate.ndim == 3)
