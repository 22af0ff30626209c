# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek under breakable graphs of the release that prepares its replays wrongly."""

from __future__ import annotations

import types

import pytest

from sglang_bcg_fixes.fixes import mla_replay_prepared_as_mha as fix
from tests import processes, wheels
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "mla_replay_prepared_as_mha"


def test_the_first_replay_is_answered_and_ends_the_server_without() -> None:
    found = alone.found(FIX, "0.5.17", "tests.scenarios.mla_replay", "--undo")
    # the two forms round differently, in float16 and with logits of about 2
    assert found["applied"] and found["same"] and 0 < found["off"] < 0.005, found
    assert "is invalid for input of size" in found["error"]
    # TensorRT-LLM's kernels are not run here: they are for Blackwell alone
    assert found["plans"] == {"eager": [False], "under a graph": ["paged", True]}
    assert found["stock plans"] == {"eager": [False], "under a graph": [False]}


def test_a_model_that_asks_no_handler_is_replayed_in_the_form_that_it_was_captured_in() -> None:
    found = alone.found(FIX, "0.5.17", "tests.scenarios.mla_replay", "--sarvam")
    # without a prefix, eager prefill is of the same form
    assert found["applied"] and found["same"] and found["replays"] and found["off"] == 0, found


@pytest.mark.parametrize(("release", "form"), [("0.5.16", "expanded"), ("0.5.18", "absorbed"), (NEWEST, "absorbed")])
def test_the_releases_round_it_need_no_fix(release: str, form: str) -> None:
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.mla_replay", SGLANG_BCG_FIXES="off")
    assert not found["applied"] and found["same"] and found["replays"], found
    # eager prefill is of the expanded form
    assert found["off"] == 0 if form == "expanded" else 0 < found["off"] < 0.005, found


@pytest.mark.parametrize(
    ("graphs", "attention", "companions"),
    [
        ("FullCudaGraphBackend", "fa3", True),
        ("BreakableCudaGraphBackend", "fa4", True),
        ("BreakableCudaGraphBackend", "fa3", False),
    ],
)
def test_other_graphs_backends_and_models_are_left_alone(graphs: str, attention: str, companions: bool) -> None:
    runner = types.SimpleNamespace(
        backend=type(graphs, (), {})(),
        has_mha_companion_layers=companions,
        model_runner=types.SimpleNamespace(prefill_attention_backend_str=attention),
    )
    # it would fail if it were asked for anything
    batch = object()
    assert fix.in_the_absorbed_form(batch, runner, "the batch") is batch
