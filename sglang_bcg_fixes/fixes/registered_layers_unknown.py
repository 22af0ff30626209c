"""A linear model that was registered with SGLang cannot be served

Symptom: The server of a model that another package made known with register_linear_attn_model does not start:
"'ModelConfig' object has no attribute 'full_attention_layer_ids'". With a sliding window beside, layers go to the wrong
attention.
Cause: Which layers have full attention is asked of SGLang's own ModelConfig, where the registered model's configuration
knows it.
Change: While the attention backends are put together, ModelConfig has what the model's own configuration says. No flag
of SGLang helps.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.model import Fix, How, PatchPoint
from sglang_bcg_fixes.source.finding import Finding
from sglang_bcg_fixes.source.tree import Source, affected, fixed

REGISTRY = "sglang.srt.configs.linear_attn_model_registry:get_linear_attn_config"
WRAPPER = "sglang.srt.layers.attention.attention_registry:attn_backend_wrapper"
LAYERS = "full_attention_layer_ids"


def probe(source: Source) -> Finding:
    wrapper = source.need(WRAPPER)
    if wrapper.mentions("cfg = runner.model_config"):
        return affected("the layers of a registered model are asked of ModelConfig", wrapper, source.need(REGISTRY))
    return fixed("the layers of a registered model are asked of its own configuration", wrapper.header)


def with_the_models_own_layers(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    config = runner.model_config
    registered = config.linear_attn_registry_result
    if registered is None:
        return original(runner, full_attn_backend)
    with replaced(config, LAYERS, getattr(registered[1], LAYERS)):
        return original(runner, full_attn_backend)


FIX = Fix(
    id="registered_layers_unknown",
    doc=__doc__,
    upstream=(),
    probe=probe,
    patches=(PatchPoint((WRAPPER,), How.AROUND, with_the_models_own_layers),),
    verify=("qwen3_next_prefill_graph",),
)
