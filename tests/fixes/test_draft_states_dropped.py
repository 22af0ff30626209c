# SPDX-License-Identifier: Apache-2.0
"""Drafts from a model's own checkpoint, given prompts and the target's states, eager and replayed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests import processes
from tests.fixes import alone
from tests.releases.test_hybrid_routing import QWEN3_5
from tests.wheels import NEWEST

MODELS = processes.REPOSITORY / "cpu_sglang" / "models"
MULTIMODAL: dict[str, Any] = {**QWEN3_5}
TEXT_ONLY = MULTIMODAL["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "torch_dtype": "float32"}
# a graph is two segments round the one attention layer
RIGHT, WRONG = [[True, 2]] * 3, [[False, 2]] * 3
# the release, the model that brings its draft, and what SGLang makes of it
CASES = {
    "0.5.19": ("0.5.19", "qwen3next", WRONG),
    "0.5.21": ("0.5.21", "qwen3next", WRONG),
    NEWEST: (NEWEST, "qwen3next", WRONG),
    f"{NEWEST}, text only": (NEWEST, TEXT_ONLY, WRONG),
    f"{NEWEST}, multimodal": (NEWEST, MULTIMODAL, RIGHT),
}


@pytest.mark.parametrize(("release", "model", "stock"), CASES.values(), ids=CASES)
def test_a_replayed_draft_knows_the_states_of_its_target(
    tmp_path: pathlib.Path, release: str, model: str | dict[str, Any], stock: list[list[Any]]
) -> None:
    if isinstance(model, str):
        folder = MODELS / model
    else:
        folder = tmp_path
        (folder / "config.json").write_text(json.dumps(model))
    found = alone.found("draft_states_dropped", release, "tests.scenarios.draft_states", str(folder))
    assert found["applied"] == ["draft_states_dropped"]
    assert found["with"] == RIGHT
    assert found["without"] == stock
