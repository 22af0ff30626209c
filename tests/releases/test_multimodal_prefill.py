# SPDX-License-Identifier: Apache-2.0
"""Multimodal models on 0.5.11: text replays, batches with images run eagerly, and both are right."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests import processes, wheels
from tests.releases import layer_stacks, multimodal_prefill

RELEASE = "0.5.11"
IMAGES = {"an image", "another image", "an image next to text"}
CASES = {*multimodal_prefill.TEXT, *multimodal_prefill.CHANGED}
# by hand, so that a model which falls out of the list is missed
CAPTURED = {
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "InternVLChatModel",
}


def outcomes(root: pathlib.Path, folder: pathlib.Path, model: str, **environment: str) -> dict[str, Any]:
    report = folder / "report.json"
    process = processes.on_cpu(
        root,
        *("-m", "tests.releases.multimodal_prefill", str(report), model),
        environment={"SGLANG_BCG_REPORT_DIR": str(folder), **environment},
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["multimodal"] and set(found["cases"]) == CASES
    # a comparison of answers says something only where images and positions change them
    assert found["an image, not another image"] > 0.1
    assert found["positions of two requests, not positions of text"] > 0.1
    return found


def right(found: dict[str, Any]) -> set[str]:
    return {name for name, case in found["cases"].items() if case["difference"] == 0.0}


def replayed(found: dict[str, Any]) -> set[str]:
    return {name for name, case in found["cases"].items() if case["replayed"]}


@pytest.mark.parametrize(
    ("model", "environment"),
    [*((model, {}) for model in multimodal_prefill.MODELS), ("dense", {"SGLANG_BCG_FIX_VLM_EMBEDS_DROPPED": "off"})],
)
def test_text_replays_and_images_do_not(model: str, environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    found = outcomes(wheels.unpacked(RELEASE), tmp_path, model, **environment)
    assert right(found) == CASES
    assert replayed(found) == CASES - IMAGES
    assert set(found["breaks"].values()) == {multimodal_prefill.SHARED["num_hidden_layers"]}


def test_without_the_plugin_images_are_lost_and_several_requests_are_eager(tmp_path: pathlib.Path) -> None:
    found = outcomes(wheels.unpacked(RELEASE), tmp_path, "no states", SGLANG_PLUGINS="__none__")
    assert CASES - right(found) == {"an image", "another image"} <= replayed(found)
    # all of these replay with the plugin too
    assert right(found) & replayed(found) == {
        *("one request", "fills its bucket", "the first again", "positions of one request", "text after an image")
    }


def test_without_the_plugin_a_hybrid_answers_no_batch_that_replays(tmp_path: pathlib.Path) -> None:
    found = outcomes(wheels.unpacked(RELEASE), tmp_path, "dense", SGLANG_PLUGINS="__none__")
    assert replayed(found) and not right(found) & replayed(found)


def test_every_multimodal_model_hands_its_layers_what_is_in_the_buffers() -> None:
    handed, log = processes.beside(
        wheels.unpacked(RELEASE), "-m", "tests.scenarios.handed_layers", "of_multimodal_models"
    )
    assert set(handed) == CAPTURED <= set(layer_stacks.MODELS)
    assert {fields["input_embeds"] for fields in handed.values()} == {"input_embeds"}
    assert {fields["input_ids"] for fields in handed.values()} == {None}
    of_three_rows = {name for name, fields in handed.items() if fields["positions"] == "mrope_positions"}
    assert of_three_rows >= {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
    assert "single_request_capture: no prefill graphs" not in log
