# SPDX-License-Identifier: Apache-2.0
"""The server does not start for a linear model that another package registers

Symptom: The server does not start for a model that another package registered with register_linear_attn_model:
"'ModelConfig' object has no attribute 'full_attention_layer_ids'". If the model also has a sliding window, layers go to
the wrong attention.
Cause: SGLang looks for the list of full attention layers in its own ModelConfig, but the registered model's
configuration holds it.
Change: While the attention backends are built, ModelConfig carries what the model's own configuration says. No flag of
SGLang helps.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import MODEL_OF_YOUR_OWN
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, ends, fixed

REGISTRY = "sglang.srt.configs.linear_attn_model_registry:get_linear_attn_config"
WRAPPER = "sglang.srt.layers.attention.attention_registry:attn_backend_wrapper"
LAYERS = "full_attention_layer_ids"


def probe(source: Source) -> Finding:
    wrapper = source.need(WRAPPER)
    if wrapper.mentions("cfg = runner.model_config"):
        return affected("a registered model's layers are looked up in ModelConfig", wrapper, source.need(REGISTRY))
    return fixed("a registered model's layers are looked up in its own configuration", wrapper.header)


def with_the_models_own_layers(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    config = runner.model_config
    registered = config.linear_attn_registry_result
    # the other package may have seen to it in a way of its own
    if registered is None or not hasattr(registered[1], LAYERS):
        return original(runner, full_attn_backend)
    with replaced(config, LAYERS, getattr(registered[1], LAYERS)):
        return original(runner, full_attn_backend)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((WRAPPER,), How.AROUND, with_the_models_own_layers),),
    verify=("qwen3_next_prefill_graph",),
    concerns=ends(MODEL_OF_YOUR_OWN),
)
