# SPDX-License-Identifier: Apache-2.0
"""Models of Mamba2 servers: sizes as published, and small ones of the same builders on the real wheels."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.bench import mamba2_layer, mamba2_model, model, model_cases
from benchmarks.bench.mamba2_model import FALCON, FALCON_LAYERS, NEMOTRON, NEMOTRON_LAYERS, PATTERN, Sizes
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.releases import in_folder
from tests import processes
from tests.wheels import NEWEST

Root = Callable[[str], pathlib.Path]
RELEASES = ("0.5.15.post1", NEWEST)
# from 0.5.19 NemotronH has prefill graphs by a fix that its flag asks for
ADMITTED = ("0.5.19", NEWEST)
WITH_GRAPHS = [
    *((release, name) for release in ("0.5.15.post1", "0.5.17", NEWEST) for name in (NEMOTRON, FALCON)),
    ("0.5.19", NEMOTRON),
]
MIXERS, SIZES = mamba2_layer.Shape(2, heads=4, groups=2, head=16, states=32, chunk=64), Sizes(64, 96, 4, 2, 16)
SMALL = {
    NEMOTRON: mamba2_model.nemotron_h(MIXERS, SIZES, "M-*M"),
    FALCON: mamba2_model.falcon_h1(dataclasses.replace(MIXERS, groups=1), SIZES, 2),
}
# of attention, and of mixers
LAYERS = {NEMOTRON: (1, 2), FALCON: (2, 2)}
# parameters that Falcon-H1 has and does not use
LEFT_OUT = ("q_norm.weight", "k_norm.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("models")
    for name in SMALL:
        models.make(name, made / name, SMALL)
    return made


def parameters(of: models.Model, words: int) -> int:
    """The number of them with a vocabulary of this size."""
    drawn = [sum(map(math.prod, layer.values())) for layer in of.layers]
    ends = sum(math.prod(words if size == models.VOCABULARY else size for size in shape) for shape in of.ends.values())
    return ends + sum(drawn[number] for number in of.order)


def test_with_all_layers_and_words_they_have_the_published_numbers_of_parameters() -> None:
    nemotron, falcon = (mamba2_layer.SHAPES[name] for name in (NEMOTRON, FALCON))
    assert PATTERN.count("M") == nemotron.layers and len(PATTERN) == 52
    whole = mamba2_model.nemotron_h(nemotron, Sizes(4096, 21504, 32, 8), PATTERN)
    assert parameters(whole, 131_072) == 8_100_852_736
    whole = mamba2_model.falcon_h1(falcon, Sizes(3072, 12288, 12, 2), falcon.layers)
    assert round(parameters(whole, 130_048) / 1e9, 2) == 7.59


def test_the_servers_have_few_of_the_layers() -> None:
    assert model.MODELS[NEMOTRON].config_json()["num_hidden_layers"] == NEMOTRON_LAYERS
    assert model.MODELS[FALCON].config_json()["num_hidden_layers"] == FALCON_LAYERS
    # each is a copy of what is on the disk
    assert all(2 * parameters(model.MODELS[name], models.VOCABULARY) < 3.5e9 for name in mamba2_model.MODELS)


def test_repeated_layers_are_drawn_once_and_share_no_memory() -> None:
    small = SMALL[NEMOTRON]
    tensors = small.tensors(1)
    names = [f"backbone.layers.{number}.mixer.in_proj.weight" for number in (0, 3)]
    first, last = (tensors[name] for name in names)
    assert first.equal(last) and first.data_ptr() != last.data_ptr()
    of_layers = {name.split(".")[2] for name in tensors if name.startswith("backbone.layers.")}
    assert of_layers == set("0123") and len(tensors) == sum(len(small.layers[number]) for number in small.order) + 3
    assert "backbone.layers.1.mixer.up_proj.weight" in tensors and "backbone.layers.2.mixer.q_proj.weight" in tensors


def test_a_folder_is_made_by_the_modules_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # which runs anew
    monkeypatch.delitem(sys.modules, model.__name__)
    monkeypatch.setattr(mamba2_model, "MODELS", SMALL)
    monkeypatch.setattr(sys, "argv", ["model", str(tmp_path), FALCON])
    runpy.run_module(model.__name__, run_name="__main__")
    config = json.loads((tmp_path / FALCON / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"]) == (["FalconH1ForCausalLM"], 2)
    assert (tmp_path / FALCON / "model.safetensors").exists()


@pytest.mark.parametrize("release", RELEASES)
def test_every_weight_is_loaded(release: str, release_root: Root, folder: pathlib.Path) -> None:
    found, _ = processes.beside(
        release_root(release),
        *("-m", "tests.scenarios.weights_taken", json.dumps({name: str(folder / name) for name in SMALL})),
        timeout=600,
        SGLANG_PLUGINS="__none__",
    )
    for name, report in found.items():
        assert report["taken"] == parameters(SMALL[name], models.VOCABULARY), f"{name}: {report}"
        assert all(missing.endswith(LEFT_OUT) for missing in report["missing"]), f"{name}: {report}"


@pytest.mark.parametrize("implementation", ["reference", "off"])
@pytest.mark.parametrize(("release", "name"), WITH_GRAPHS)
def test_replays_break_at_attention_only_and_answer_as_eager_prefill(
    release: str, name: str, implementation: str, release_root: Root, folder: pathlib.Path
) -> None:
    found: dict[str, Any]
    source = in_folder(release_root(release))
    is_admitted = model_cases.is_admitted_by_a_fix(model_cases.CASES[name], source)
    assert is_admitted == (name == NEMOTRON and release in ADMITTED)
    found, _ = processes.beside(
        release_root(release),
        *("-m", "tests.bench.cpu_mamba2_model", str(folder / name)),
        # as the model's own, which is in half precision here
        environment={
            **{KERNEL.flag: implementation, "SGLANG_MAMBA_CONV_DTYPE": "float16"},
            **({declared_in(hybrids_without_graphs).flag: "on"} if is_admitted else {}),
        },
        timeout=600,
    )
    attention, mixers = LAYERS[name]
    assert set(found["breaks"].values()) == {attention + (0 if implementation == "reference" else mixers)}
    assert found["left"] == {} and found["finite"] and found["spread"] > 0.5
    conv, state = found["pools"]
    shape = MIXERS if name == NEMOTRON else dataclasses.replace(MIXERS, groups=1)
    assert (conv[0], state[0]) == (mixers, mixers) and model_cases.CASES[name].applies_to(source)
    assert (conv[2:], state[2:]) == (
        [shape.of_kernel.channels, shape.width - 1],
        [shape.heads, shape.head, shape.states],
    )
    assert all(script["logits"] <= 0.02 and script["nobody's"] for script in found["scripts"]), found


@pytest.mark.parametrize("release", ADMITTED)
def test_without_the_fix_sglang_captures_nothing_of_it(release: str, release_root: Root, folder: pathlib.Path) -> None:
    done = processes.on_cpu(
        release_root(release),
        *("-m", "tests.bench.cpu_mamba2_model", str(folder / NEMOTRON)),
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float16", "SGLANG_PLUGINS": "__none__"},
        timeout=600,
    )
    assert done.returncode and "captured nothing" in done.stderr, done.stderr
