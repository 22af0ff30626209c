# SPDX-License-Identifier: Apache-2.0
"""The real wrapper of attention backends with a model that another package has registered."""

from __future__ import annotations

import types

import pytest

from sglang_bcg_fixes.fixes import registered_layers_unknown as fix
from tests import processes, wheels


@pytest.mark.parametrize("release", ["0.5.18", "0.5.20"])
def test_a_registered_model_says_which_layers_are_full(release: str) -> None:
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.registered_model")
    assert found["without"] == ["'Config' object has no attribute 'full_attention_layer_ids'", None]
    assert found["with a window, without"] == [[2], [2]]
    assert found["with"] == [[1, 3], None]
    assert found["with a window"] == [[1, 3], [2]]


def test_a_package_that_has_seen_to_it_is_left_alone() -> None:
    config = types.SimpleNamespace(linear_attn_registry_result=(None, types.SimpleNamespace()))
    runner = types.SimpleNamespace(model_config=config)
    assert fix.with_the_models_own_layers(lambda given, backend: (given, backend), runner, "full") == (runner, "full")
