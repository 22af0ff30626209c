# SPDX-License-Identifier: Apache-2.0
"""The configuration of a model that somebody names; nothing is fetched."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.source.tree import Source

# of a model on Hugging Face, and where its configuration is
NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB = "https://huggingface.co/{}/resolve/main/config.json"
OVERRIDE = "--json-model-override-args"
# the name of an architecture in a published configuration -> SGLang's, the kind of model, and where it is renamed
RENAMED = {"DeepseekV41ForCausalLM": ("DeepseekV4ForCausalLM", "deepseek_v41", "sglang.srt.configs.deepseek_v41")}
# how much of an architecture's name has to be that of another
ALIKE = 0.85


class ModelError(Exception):
    """The model's configuration cannot be read or judged, and what to do."""


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder, a file, or a model in the cache of Hugging Face."""
    if not model.strip():
        raise ModelError("--model is empty: the variable that should name the model may not be set")
    path = pathlib.Path(model)
    files = [path / "config.json", path, *cached(model)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        fetch = (
            f"`curl -fLO {HUB.format(model)}`, then --model config.json" if NAME.fullmatch(model) else "name another"
        )
        raise ModelError(f"{model} is no folder with a config.json, no file, and not in {flags.model_cache()}; {fetch}")
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); name the model's config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is no model's configuration; name its config.json")
    return config


def overridden(config: dict[str, Any], word: str) -> dict[str, Any]:
    """The configuration with what a flag puts in its place; what SGLang would only add to stays beside it."""
    try:
        given = json.loads(word)
    except ValueError as error:
        raise ModelError(f"the word after {OVERRIDE} is no JSON ({error}); quote it for the shell") from error
    if not isinstance(given, dict):
        raise ModelError(f"the word after {OVERRIDE} is no JSON object")
    merged = {}
    for key, value in given.items():
        before = config.get(key)
        merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return {**config, **merged}


def cached(model: str) -> list[pathlib.Path]:
    """The newest first."""
    if not NAME.fullmatch(model):
        return []
    found = flags.model_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def as_sglang_names_it(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    for given, (name, kind, module) in RENAMED.items():
        if config.get("architectures") == [given] and source.has_module(module):
            return {**config, "architectures": [name], "model_type": kind}
    return config


def check_architectures(source: Source, config: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Refuse a model that this SGLang does not have: nothing that is said of it would be true."""
    named = config.get("architectures")
    given = named if isinstance(named, list) else [named]
    names = [name for name in given if isinstance(name, str) and name]
    if not names or names != given:
        kind = "a diffusers pipeline" if "_class_name" in config else "without a list of `architectures`"
        raise ModelError(f"this configuration is {kind}, so nobody can tell which model it is of; give the model's own")
    if environ.get(flags.MODELS_OF_ANOTHER_PACKAGE, "").strip():
        return
    for name in names:
        if name not in source.architectures:
            nearest = flags.nearest(name, source.architectures, ALIKE)
            raise ModelError(f"SGLang {source.version} has no model {name}{nearest}")
