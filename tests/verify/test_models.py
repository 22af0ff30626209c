# SPDX-License-Identifier: Apache-2.0
"""The tiny models on real releases: every weight of the checkpoint is taken, and no parameter is left without one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.lab.verify import models
from tests import processes
from tests.wheels import NEWEST

# what the release has and does not use, or takes from the target model
LEFT_OUT = {
    "falcon_h1": ("q_norm.weight", "k_norm.weight"),
    "llama_eagle_draft": ("embed_tokens.weight", "lm_head.weight"),
    "llama_eagle3_draft": ("embed_tokens.weight",),
    "qwen3_next_mtp as draft": ("embed_tokens.weight", "lm_head.weight"),
}
OF_THE_LAYER_THAT_DRAFTS = "mtp."
# the releases that know no such class
NOT_THERE = {"qwen3_5_text": ("0.5.11", "0.5.12.post1", "0.5.15.post1")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("models")
    for name in models.MODELS:
        models.make(name, made / name)
    return made


def sizes(folder: pathlib.Path) -> dict[str, int]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1", "0.5.15.post1", NEWEST])
def test_every_weight_is_loaded(
    release: str, release_root: Callable[[str], pathlib.Path], folder: pathlib.Path
) -> None:
    wanted = {name: str(folder / name) for name in models.MODELS if release not in NOT_THERE.get(name, ())}
    wanted["qwen3_next_mtp as draft"] = wanted["qwen3_next_mtp"]
    found, _ = processes.beside(
        release_root(release),
        *("-m", "tests.scenarios.weights_taken", json.dumps(wanted)),
        timeout=600,
        SGLANG_PLUGINS="__none__",
    )
    for name, report in found.items():
        given = sizes(pathlib.Path(wanted[name]))
        drafts = name.endswith(" as draft")
        mine = sum(size for weight, size in given.items() if weight.startswith(OF_THE_LAYER_THAT_DRAFTS) is drafts)
        assert report["taken"] == mine, f"{name}: {report}"
        assert all(missing.endswith(LEFT_OUT.get(name, ())) for missing in report["missing"]), f"{name}: {report}"


def test_the_same_name_makes_the_same_weights(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    models.make("llama", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "llama" / "model.safetensors").read_bytes()


def test_the_draft_is_the_targets_layer(folder: pathlib.Path) -> None:
    from safetensors.torch import load_file

    target = load_file(folder / "llama_eagle_target" / "model.safetensors")
    draft = load_file(folder / "llama_eagle_draft" / "model.safetensors")
    for name, values in draft.items():
        if name.startswith("layers.0."):
            assert values.equal(target[f"model.{name}"])
    sizes_of_tokens = target["model.embed_tokens.weight"].float().pow(2).mean(-1).sqrt()
    assert (sizes_of_tokens - 1).abs().max() < 0.01
