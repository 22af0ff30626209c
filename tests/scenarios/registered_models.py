# SPDX-License-Identifier: Apache-2.0
"""Architectures of SGLang's registry, found one by one or imported all at once (`whole`)."""

from __future__ import annotations

import sys
from typing import Any

from cpu_sglang import model_registry, one_batch
from tests.scenarios import telling


def main(way: str) -> None:
    one_batch.import_sglang()
    one_batch.load_plugins()
    if way == "one_by_one":
        model_registry.install()
    from sglang.srt.models.registry import ModelRegistry

    before = imported()
    looked_up = {name: place(ModelRegistry.models[name]) for name in ("LlamaForCausalLM", "Qwen3_5ForCausalLMMTP")}
    few = imported() - before
    known = {"unknown": "NobodysForCausalLM" in ModelRegistry.models, "phi": "PhiForCausalLM" in ModelRegistry.models}
    ModelRegistry.models["NobodysForCausalLM"] = int
    archs = sorted(ModelRegistry.get_supported_archs())
    places = {name: place(ModelRegistry.models[name]) for name in archs}
    rest = {"looked_up": looked_up, "known": known, "places": places, "listed": len(ModelRegistry.models)}
    telling.result({"few": len(few), "all": len(imported() - before), "rest": rest})


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith("sglang.srt.models.")}


def place(model: Any) -> str:
    return f"{model.__module__}.{model.__name__}"


if __name__ == "__main__":
    main(sys.argv[1])
