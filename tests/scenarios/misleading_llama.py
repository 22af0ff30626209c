# SPDX-License-Identifier: Apache-2.0
"""`cpu_sglang.prefill` with a whole Llama, logits and all, where SGLang expects the layers alone.

It has an attribute `layers`, by which SGLang finds layers.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from cpu_sglang import one_batch, prefill

load = one_batch.load


def load_misleading(model: str, **server_args: Any) -> one_batch.LoadedModel:
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.registry import ModelRegistry

    class MisleadingLlama(torch.nn.Module):
        def __init__(self, config: Any, quant_config: Any = None) -> None:
            super().__init__()
            self.model = llama_with_layers(config, quant_config)

        def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
            return self.model(input_ids, positions, forward_batch)

    llama_with_layers = type(
        "LlamaWithLayers", (LlamaForCausalLM,), {"layers": property(lambda self: self.model.layers)}
    )
    ModelRegistry.models["MisleadingLlama"] = MisleadingLlama
    override = json.dumps({"architectures": ["MisleadingLlama"]})
    return load(model, json_model_override_args=override, **server_args)


if __name__ == "__main__":
    one_batch.load = load_misleading
    prefill.main()
