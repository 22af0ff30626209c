# SPDX-License-Identifier: Apache-2.0
"""Architectures of the accuracy model, by the name that a Hugging Face folder has for them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import granite
import hybrid
import kimi
import lfm2
import nemotron_h
import qwen3_next

FAMILIES: dict[str, type[Any]] = {
    family.family: family
    for family in (qwen3_next.Qwen3Next, nemotron_h.NemotronH, granite.Granite, lfm2.Lfm2, kimi.KimiLinear)
}


def load(folder: pathlib.Path) -> hybrid.Hybrid:
    return hybrid.load(FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]], folder)
