# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma3n's and MiniCPM-SALA's prefill graphs, with and without the fix: a real scheduler with a warm cache."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.anatomy import attention_break
from sglang_bcg_fixes.fixes import heads_not_joined as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes
from tests.fixes import settings
from tests.wheels import NEWEST, RELEASES

FIX = declared_in(fix)
Root = Callable[[str], pathlib.Path]
# earlier releases cannot build the model
BUILT = RELEASES[RELEASES.index("0.5.14") :]
WITH_MIXERS = RELEASES[RELEASES.index("0.5.19") :]
ERROR = "mat1 and mat2 shapes cannot be multiplied"
# layers that share a KV cache have a defect of their own
APART = json.dumps({"num_kv_shared_layers": 0})
BY_TRITON = json.dumps({"num_kv_shared_layers": 0, "server": {"attention_backend": "triton"}})
PROGRAM = ("-m", "tests.scenarios.warm_replays", "Gemma3nForCausalLM")
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


def answered(root: pathlib.Path, given: str, flag: str = "on", program: tuple[str, ...] = PROGRAM) -> dict[str, Any]:
    found: dict[str, Any] = processes.beside(root, *program, given, **settings.only(FIX.id, flag))[0]
    return found


@pytest.mark.parametrize("release", BUILT)
def test_replays_are_the_eager_answers_and_the_capture_ends_the_server_without(
    release_root: Root, release: str
) -> None:
    found, stock = answered(release_root(release), APART), answered(release_root(release), APART, "off")
    assert found["applied"] == [FIX.id] and found["replays"], found
    assert all(found["same"]) and found["again"] == found["found"] and any(found["found"]), found
    assert not stock["applied"] and ERROR in stock["error"], stock


@pytest.mark.parametrize("error", SALA)
@pytest.mark.parametrize("release", WITH_MIXERS)
def test_so_are_those_of_lightning_attention(release_root: Root, release: str, error: str) -> None:
    given, program = json.dumps(SALA[error]), (*PROGRAM[:2], "MiniCPMSALAForCausalLM")
    found = answered(release_root(release), given, program=program)
    # its states are cached at boundaries that no prompt of these reaches
    assert found["applied"] == [FIX.id] and found["replays"] and all(found["same"]), found
    stock = answered(release_root(release), given, "off", program)
    assert not stock["applied"] and error in stock["error"], stock


def test_triton_gives_its_output_by_heads_eagerly_too(release_root: Root) -> None:
    found = answered(release_root(NEWEST), BY_TRITON)
    assert found["replays"] and all(found["same"]), found
    stock = processes.on_cpu(
        release_root(NEWEST), *PROGRAM, BY_TRITON, environment=settings.only(FIX.id, "off"), timeout=300
    )
    assert stock.returncode and ERROR in stock.stderr, stock.stderr[-2000:]


def test_what_has_two_dimensions_is_handed_on_and_three_are_viewed_as_two() -> None:
    assert attention_break.join_heads(None, (), torch.ones(3, 8)) is None
    by_heads = torch.arange(24.0).reshape(3, 2, 4)
    joined = attention_break.join_heads(None, (), by_heads)
    assert joined is not None and joined.data_ptr() == by_heads.data_ptr()
    assert joined.tolist() == by_heads.reshape(3, 8).tolist()
