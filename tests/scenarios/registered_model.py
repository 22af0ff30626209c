# SPDX-License-Identifier: Apache-2.0
"""The real wrapper of attention backends with a model that another package has registered."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

from cpu_sglang import stand_ins
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.fixes import registered_layers_unknown
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(registered_layers_unknown)


class Linear:
    def __init__(self, runner: Any) -> None:
        self.runner = runner


class Hybrid:
    def __init__(self, full: Any, linear: Any, layers: list[int]) -> None:
        self.layers = layers


def main() -> None:
    stand_ins.install()
    from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.linear import utils
    from transformers import PretrainedConfig

    of_another_package = type("OfAnotherPackage", (PretrainedConfig,), {"full_attention_layer_ids": [1, 3]})
    # without what ModelConfig reads from a checkpoint
    config_family = type("Config", (ModelConfig,), {"__init__": lambda self: None})
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=of_another_package,
            backend_class_name=f"{__name__}.Linear",
            arch_names=["OfAnotherPackage"],
            hybrid_backend_class_name=f"{__name__}.Hybrid",
        )
    )
    utils.resolve_linear_attn_backends = lambda *args, **kwargs: None

    def layers(before: list[int] | None = None) -> list[Any]:
        config = config_family()
        config.hf_config = config.hf_text_config = of_another_package(architectures=["OfAnotherPackage"])
        config.dtype = None
        if before is not None:
            config.full_attention_layer_ids = before
        runner = types.SimpleNamespace(
            model_config=config, use_mla_backend=False, is_draft_worker=False, server_args=mock.MagicMock()
        )
        try:
            found = attention_registry.attn_backend_wrapper(runner, None).layers
        except AttributeError as error:
            found = str(error)
        return [found, vars(config).get("full_attention_layer_ids")]

    found = {"without": layers(), "with a window, without": layers([2])}
    Ledger().apply(FIX)
    telling.result({**found, "with": layers(), "with a window": layers([2])})


if __name__ == "__main__":
    main()
