# SPDX-License-Identifier: Apache-2.0
"""The check of SGLang's choice of the layers: on real models, and on one of our own whose names mislead it."""

from __future__ import annotations

import json
import logging
import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from sglang_bcg_fixes.fixes import layer_stack_by_name as fix
from tests import processes, wheels
from tests.engine.test_layer_stack import EmbeddingsAskedFor, OtherOrder, Stack, attention_in, blocks, causal
from tests.releases.layer_stacks import MODELS
from tests.releases.test_layer_stack import by_name, examined, table
from tests.wheels import NEWEST

ON = {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "off", fix.FLAG: "on"}
UNSET = {"SGLANG_PLUGINS": "bcg_fixes"}


@pytest.mark.parametrize(
    ("release", "warned"),
    [
        (
            "0.5.12.post1",
            {"Gemma4ForConditionalGeneration": "SGLang knows no name for its layers, which are language_model"},
        ),
        (
            "0.5.23",
            {"MuseSparkForConditionalGeneration": "in model; by structure they are model.language_model, which is"},
        ),
    ],
)
def test_real_models_keep_their_layers_or_one_warning_says_why_not(release: str, warned: dict[str, str]) -> None:
    found = examined(wheels.unpacked(release), **ON)
    warnings = {model: row["warnings"] for model, row in found.items() if row.get("warnings")}
    assert warnings.keys() == warned.keys()
    for model, (warning,) in warnings.items():
        assert warned[model] in warning and f".{model}: " in warning and f"{fix.FLAG}=off" in warning
    mended = {model: MODELS[model].path for model in warned if "is captured" in warnings[model][0]}
    assert by_name(found) == {**table()[release], **mended}


class LayersInAList(Stack):
    """A stack that a release finds by name and structure does not: its layers are not in a module list."""

    def __init__(self) -> None:
        super().__init__(first=blocks(1)[0])
        self.layers = [self.first]


def runner(model: nn.Module, by_name: nn.Module | None, **others: Any) -> types.SimpleNamespace:
    settings = {"is_multimodal": False, "_input_embeds_arg_idx": 7, **others}
    model_runner = types.SimpleNamespace(model=model)
    return types.SimpleNamespace(
        model_runner=model_runner, attention_layers=attention_in(model), layer_model=by_name, **settings
    )


@pytest.mark.parametrize(
    ("stack", "place"),
    [(Stack(layers=blocks()), 3), (EmbeddingsAskedFor(layers=blocks()), 3), (OtherOrder(layers=blocks()), None)],
)
def test_another_stack_brings_its_own_place_of_the_embeddings(stack: nn.Module, place: int | None) -> None:
    model = causal(Stack(inner=stack))
    changed = runner(model, model.get_submodule("model"))
    fix.prefer_structure(changed)
    assert changed.layer_model is stack and changed._input_embeds_arg_idx == place


@pytest.mark.parametrize(
    ("model", "others", "reason"),
    [
        (causal(LayersInAList()), {}, "no list of layers holds all its attention layers"),
        (causal(Stack(inner=OtherOrder(layers=blocks()))), {"is_multimodal": True}, "takes no embeddings"),
    ],
)
def test_without_an_answer_sglangs_choice_stays_and_one_warning_says_why(
    caplog: pytest.LogCaptureFixture, model: nn.Module, others: dict[str, Any], reason: str
) -> None:
    kept = runner(model, model.get_submodule("model"), **others)
    fix.prefer_structure(kept)
    assert kept.layer_model is model.model and kept._input_embeds_arg_idx == 7
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and reason in record.getMessage()
    assert "test_layer_stack.Stack: SGLang captures model, found by name" in record.getMessage()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (causal(Stack(layers=blocks())), "SGLang knows no name for its layers, which are model"),
        (causal(LayersInAList()), "its layers were found neither by name nor by structure: Stack: no list of layers"),
    ],
)
def test_eager_prefill_is_said_once(caplog: pytest.LogCaptureFixture, model: nn.Module, words: str) -> None:
    eager = runner(model, None)
    fix.prefer_structure(eager)
    assert eager.layer_model is None and not caplog.records, "another kind of graphs captures the whole model"
    fix.say_where_the_layers_are(None, eager, eager.model_runner)
    (record,) = caplog.records
    assert eager.layer_model is None and f"prefill runs eagerly: {words}" in record.getMessage()


def test_agreement_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model = causal(Stack(layers=blocks()))
    same = runner(model, model.get_submodule("model"))
    fix.prefer_structure(same)
    fix.say_where_the_layers_are(None, same, same.model_runner)
    assert same.layer_model is model.model and same._input_embeds_arg_idx == 7 and not caplog.records


@pytest.fixture
def misled(tmp_path: pathlib.Path) -> Callable[..., tuple[dict[str, Any], str]]:
    def run(release: str, environ: dict[str, str]) -> tuple[dict[str, Any], str]:
        report = tmp_path / "report.json"
        done = processes.on_cpu(
            wheels.unpacked(release),
            *("-m", "tests.scenarios.misleading_llama", "--model", "llama"),
            *("--freed-memory", "kept", "--json", str(report)),
            environment=environ,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(report.read_text()), done.stderr

    return run


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.15.post1", NEWEST])
def test_a_model_whose_names_mislead(misled: Callable[..., tuple[dict[str, Any], str]], release: str) -> None:
    stock, said = misled(release, UNSET)
    if release == "0.5.12.post1":
        # the logits of the one request that was captured, for two
        assert all(len(batch["tokens"]) == 1 and len(batch["tokens_eager"]) == 2 for batch in stock["batches"])
    else:
        assert "Unsupported BCG output type" in stock["error"]
    assert "layer_stack_by_name: " not in said

    mended, said = misled(release, ON)
    assert "error" not in mended, mended["error"]
    assert all(batch["segments_replayed"] == 3 for batch in mended["batches"])
    assert {batch["max_abs_logit_difference"] for batch in mended["batches"]} == {0.0}
    assert said.count("layer_stack_by_name: ") == 1
    assert "MisleadingLlama: by name SGLang found the layers in model; by structure they are model.model" in said
