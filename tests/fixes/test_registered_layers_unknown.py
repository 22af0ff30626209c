# SPDX-License-Identifier: Apache-2.0
"""The real wrapper of attention backends with a model that another package has registered."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes


@pytest.mark.parametrize("release", ["0.5.18", "0.5.20"])
def test_a_registered_model_says_which_layers_are_full(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found, _ = processes.beside(release_root(release), "-m", "tests.scenarios.registered_model")
    assert found["without"] == ["'Config' object has no attribute 'full_attention_layer_ids'", None]
    assert found["with a window, without"] == [[2], [2]]
    assert found["with"] == [[1, 3], None]
    assert found["with a window"] == [[1, 3], [2]]
