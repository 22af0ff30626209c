# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs of tiny models whose last layers read the KV cache of earlier ones, with and without the fix."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import shared_layers_refused as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes, wheels
from tests.wheels import NEWEST, RELEASES

FIX = "heads_not_joined"
LISTED_BY_ID = RELEASES[RELEASES.index("0.5.19") :]
GEMMA4 = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
SIZES = dict.fromkeys(fix.ALIKE, 8)


def answered(release: str, architecture: str, given: dict[str, Any], *on: str) -> Any:
    flags = dict.fromkeys((f"SGLANG_BCG_FIX_{one.upper()}" for one in on), "on")
    program = ("-m", "tests.scenarios.warm_replays", architecture, json.dumps(given))
    return processes.beside(wheels.unpacked(release), *program, SGLANG_BCG_FIXES="off", environment=flags)[0]


@pytest.mark.parametrize("release", LISTED_BY_ID)
def test_replays_are_the_eager_answers_and_the_server_ends_without(release: str) -> None:
    found, stock = (answered(release, "Gemma4ForCausalLM", GEMMA4, *on) for on in ((declared_in(fix).id,), ()))
    assert found["applied"] == [declared_in(fix).id] and found["replays"], found
    assert all(found["same"]) and found["again"] == found["found"] and any(found["found"]), found
    assert not stock["applied"] and "duplicate attention layer_id: 0" in stock["error"], stock


def test_gemma3n_needs_both_of_its_fixes() -> None:
    both = declared_in(fix).id, FIX
    found = answered(NEWEST, "Gemma3nForCausalLM", {}, *both)
    assert found["replays"] and all(found["same"]), found
    alone = [answered(NEWEST, "Gemma3nForCausalLM", {}, one)["error"] for one in both]
    assert "cannot be multiplied" in alone[0] and "duplicate attention layer_id" in alone[1]


def layer(number: int, **others: Any) -> Any:
    return types.SimpleNamespace(layer_id=number, **{**SIZES, **others})


class Original:
    """A list by ids as of 0.5.19, no longer than the largest id asks for; it keeps what it was given."""

    def __call__(self, attention: Any, companions: Any, layer_model: Any = None) -> tuple[list[Any], list[Any]]:
        self.given = attention, companions, layer_model
        by_id = {given.layer_id: given for given in attention if given is not None}
        return [by_id.get(number) for number in range(max(by_id) + 1)], [None] * (max(by_id) + 1)


def test_a_layer_that_shares_stands_at_its_own_place() -> None:
    layers, original = [layer(0), layer(1), layer(0), layer(1)], Original()
    listed, companions = fix.list_those_that_share(original, layers, [None] * 4, "model")
    assert [id(one) for one in listed] == [id(one) for one in layers] and companions == [None] * 4
    assert original.given == ([layers[0], layers[1], None, None], [None] * 4, "model")


AGAIN = layer(0)
LEFT_TO_SGLANG = {
    "no id twice": ([layer(0), layer(1)], [None] * 2),
    "the same layer again": ([AGAIN, AGAIN], [None] * 2),
    "of another stage": ([None, layer(1)], [None] * 2),
    "other heads": ([layer(0), layer(0, tp_k_head_num=4)], [None] * 2),
    "another window": ([layer(0), layer(0, sliding_window_size=64)], [None] * 2),
    "an unknown kind of layer": ([types.SimpleNamespace(layer_id=0), types.SimpleNamespace(layer_id=0)], [None] * 2),
    "one without an id": ([layer(0), layer(0), types.SimpleNamespace()], [None] * 3),
    "companions": ([layer(0), layer(0)], [None, layer(0)]),
    "a place that is an id": ([layer(1), layer(1), layer(2)], [None] * 3),
}


@pytest.mark.parametrize("case", LEFT_TO_SGLANG)
def test_other_lists_reach_sglang_as_they_are(case: str) -> None:
    layers, companions = LEFT_TO_SGLANG[case]
    given: list[Any] = []

    def original(*arguments: Any) -> tuple[list[Any], list[Any]]:
        given.extend(arguments)
        return [], []

    assert fix.list_those_that_share(original, layers, companions, "model") == ([], [])
    assert given[0] is layers and given[1] is companions and given[2] == "model"
