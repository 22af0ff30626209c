# SPDX-License-Identifier: Apache-2.0
"""Random conversations with every fix on: no turn's answer from a warm prefix cache is another than the cold one.

To repeat a failure, or to look further: BCG_FIXES_SEED=7 pytest tests/releases/test_random_conversations.py.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.wheels import NEWEST

SEED = int(os.environ.get("BCG_FIXES_SEED", "1"))
# as `make test-all` holds them, and as `make test` does
TURNS, FEW_TURNS = 200, 16
SERVER = {"attention_backend": "triton", "disable_overlap_schedule": False}
SERVERS: dict[str, dict[str, Any]] = {
    # Mamba2, gated delta net and lightning attention
    "falcon_h1": SERVER,
    "qwen3next": SERVER | {"dtype": "float16"},
    "bailing_full": {"disable_overlap_schedule": False},
}
HELD = [
    *(("falcon_h1", release) for release in ("0.5.14", "0.5.16", "0.5.20", NEWEST)),
    ("qwen3next", NEWEST),
    ("bailing_full", "0.5.16"),
]


def hold(root: pathlib.Path, model: str, seed: int, turns: int, **switches: str) -> Any:
    given = json.dumps(SERVERS[model] | {"seed": seed, "turns": turns})
    arguments = ("-m", "tests.scenarios.random_conversations", model, given)
    # kernels have tests of their own, and are slow where none compiles
    environment = {"SGLANG_BCG_KERNELS": "off", **switches}
    return processes.beside(root, *arguments, environment=environment, timeout=1800)[0]


@pytest.mark.parametrize(("model", "release"), HELD)
def test_every_warm_answer_is_the_cold_one(
    release_root: Callable[[str], pathlib.Path], model: str, release: str, everything: bool
) -> None:
    found = hold(release_root(release), model, SEED, TURNS if everything else FEW_TURNS)
    assert found["wrong"] == [] and found["hits"] >= found["turns"] / 4, found


def test_a_wrong_checkpoint_is_found(release_root: Callable[[str], pathlib.Path]) -> None:
    found = hold(release_root("0.5.16"), "falcon_h1", 1, 30, SGLANG_BCG_FIX_MAMBA2_CHECKPOINT_GRID="off")
    assert found["wrong"] and "mamba2_checkpoint_grid" not in found["applied"], found
