# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma3n's and MiniCPM-SALA's prefill graphs, with and without the fix: a real scheduler with a warm cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy import attention_break
from tests import processes, wheels
from tests.fixes import alone, settings
from tests.wheels import NEWEST, RELEASES

FIX = "heads_not_joined"
# earlier releases cannot build the model
BUILT = RELEASES[RELEASES.index("0.5.14") :]
WITH_MIXERS = RELEASES[RELEASES.index("0.5.19") :]
ERROR = "mat1 and mat2 shapes cannot be multiplied"
# layers that share a KV cache have a defect of their own
APART = json.dumps({"num_kv_shared_layers": 0})
BY_TRITON = json.dumps({"num_kv_shared_layers": 0, "server": {"attention_backend": "triton"}})
PROGRAM = "tests.scenarios.warm_replays"
MIXERS = {
    "mixer_types": ["minicpm4", "lightning-attn", "lightning-attn"],
    **{"lightning_nh": 2, "lightning_nkv": 2, "lightning_head_dim": 128},
}
# as published; with a gate alone, and with nothing between the mixer and its projection
SALA = {
    "Expected hidden_size to be 256, but found: 128": {**MIXERS, "use_output_gate": True, "use_output_norm": True},
    "must match the size of tensor b": {**MIXERS, "use_output_gate": True, "use_output_norm": False},
    ERROR: {**MIXERS, "use_output_gate": False, "use_output_norm": False},
}


def answered(release: str, given: str, flag: str = "on", model: str = "Gemma3nForCausalLM") -> Any:
    return alone.found(FIX, release, PROGRAM, model, given, flag=flag)


@pytest.mark.parametrize("release", BUILT)
def test_replays_are_the_eager_answers_and_the_capture_ends_the_server_without(release: str) -> None:
    found, stock = answered(release, APART), answered(release, APART, "off")
    assert found["applied"] == [FIX] and found["replays"], found
    assert all(found["same"]) and found["again"] == found["found"] and any(found["found"]), found
    assert not stock["applied"] and ERROR in stock["error"], stock


@pytest.mark.parametrize("error", SALA)
@pytest.mark.parametrize("release", WITH_MIXERS)
def test_so_are_those_of_lightning_attention(release: str, error: str) -> None:
    given, model = json.dumps(SALA[error]), "MiniCPMSALAForCausalLM"
    found = answered(release, given, model=model)
    # its states are cached at boundaries that no prompt of these reaches
    assert found["applied"] == [FIX] and found["replays"] and all(found["same"]), found
    stock = answered(release, given, "off", model)
    assert not stock["applied"] and error in stock["error"], stock


def test_triton_gives_its_output_by_heads_eagerly_too() -> None:
    found = answered(NEWEST, BY_TRITON)
    assert found["replays"] and all(found["same"]), found
    program, off = ("-m", PROGRAM, "Gemma3nForCausalLM", BY_TRITON), settings.only(FIX, "off")
    stock = processes.on_cpu(wheels.unpacked(NEWEST), *program, environment=off)
    assert stock.returncode and ERROR in stock.stderr, stock.stderr[-2000:]


def test_what_has_two_dimensions_is_handed_on_and_three_are_viewed_as_two() -> None:
    assert attention_break.join_heads(None, (), torch.ones(3, 8)) is None
    by_heads = torch.arange(24.0).reshape(3, 2, 4)
    joined = attention_break.join_heads(None, (), by_heads)
    assert joined is not None and joined.data_ptr() == by_heads.data_ptr()
    assert joined.tolist() == by_heads.reshape(3, 8).tolist()
