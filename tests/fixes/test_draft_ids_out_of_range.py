# SPDX-License-Identifier: Apache-2.0
"""Drafts that are replayed for batches with an image, whose ids are outside the vocabulary."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.fixes import draft_ids_out_of_range as fix
from tests import processes
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "draft_ids_out_of_range"
MODELS = processes.REPOSITORY / "cpu_sglang" / "models"
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
EAGLE3 |= {"draft_vocab_size": 128, "target_hidden_size": 64}
NEMOTRON = {"mtp_hybrid_override_pattern": "*", "num_nextn_predict_layers": 1, "torch_dtype": "float16"}
# the target, what its configuration becomes, and the algorithm
DRAFTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "EAGLE3": ("llama", EAGLE3, "EAGLE3"),
    "NemotronH": ("nemotron_h", NEMOTRON, "EAGLE"),
}
REPLAYED, ENDED = [True, 2, True], ["index out of range in self"]


@pytest.mark.parametrize(
    ("release", "draft"), [("0.5.16", "EAGLE3"), ("0.5.21", "EAGLE3"), ("0.5.22", "NemotronH"), (NEWEST, "NemotronH")]
)
def test_a_replay_with_an_image_ends_the_server_without(tmp_path: pathlib.Path, release: str, draft: str) -> None:
    target, changed, algorithm = DRAFTS[draft]
    config = json.loads((MODELS / target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    found = alone.found(FIX, release, "tests.scenarios.draft_ids", target, str(tmp_path), algorithm)
    assert found["applied"] == [FIX]
    assert found["without"] == [REPLAYED, ENDED, ENDED, REPLAYED]
    # the draft does not see the image
    assert found["with"] == [REPLAYED, [False, 2, True], [False, 2, True], REPLAYED]


@pytest.mark.parametrize("states", [None, object()])
@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("is_tuple", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_ids_that_a_draft_looks_up_beside_an_image_are_clamped(
    states: object, has_image: bool, is_tuple: bool, ranks: int
) -> None:
    filled = types.SimpleNamespace(input_ids=torch.tensor([5, 1_000_000, -7, 127]))
    table = type(fix.TABLE, (torch.nn.Module,), {"tp_size": ranks})()
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), table)
    model_runner = types.SimpleNamespace(model=model, model_config=types.SimpleNamespace(vocab_size=128))
    runner = types.SimpleNamespace(static_draft_hidden_states=states, model_runner=model_runner)
    batch = types.SimpleNamespace(contains_mm_inputs=lambda: has_image)
    result = (filled, "ends") if is_tuple else filled
    assert fix.clamp(result, runner, batch) is result
    clamped = states is not None and has_image and ranks == 1
    assert filled.input_ids.tolist() == ([5, 127, 0, 127] if clamped else [5, 1_000_000, -7, 127])
