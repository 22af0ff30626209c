# SPDX-License-Identifier: Apache-2.0
"""Arguments that each multimodal model of 0.5.11 hands its layers when it is captured, on torch's meta device."""

from __future__ import annotations

import logging
from typing import Any

import torch

from cpu_sglang import one_batch
from sglang_bcg_fixes.fixes import single_request_capture as fix
from tests.releases import layer_stacks
from tests.scenarios import named


class NoNumbers(torch.overrides.TorchFunctionMode):
    """Copies nothing: embeddings without values cannot be copied to a buffer."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.copy_ else function(*args, **(kwargs or {}))


def of_multimodal_models() -> dict[str, Any]:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    model_runner = one_batch.load("llama", dtype="bfloat16").model_runner
    from sglang.srt.model_executor.breakable_cuda_graph_runner import BreakableCudaGraphRunner
    from sglang.srt.models.registry import ModelRegistry

    handed: dict[str, Any] = {}

    def stop(runner: Any) -> None:
        with NoNumbers():
            layers = fix.captured_layers(runner)
        handed[name] = layers and layers.handed
        raise layer_stacks.AboutToCapture(runner)

    BreakableCudaGraphRunner._warmup = stop
    said = layer_stacks.Said()
    logging.getLogger().addHandler(said)
    logging.getLogger("sglang").setLevel(logging.INFO)
    known = ModelRegistry.get_supported_archs()
    for name in (name for name in layer_stacks.MODELS if layer_stacks.architecture_of(name) in known):
        try:
            model_config, model = layer_stacks.build(name)
        except Exception:
            # layer_stacks.json has which, and why
            continue
        if model_config.is_multimodal:
            said.records.clear()
            layer_stacks.start_runner(model_runner, model_config, model, said)
    return handed


if __name__ == "__main__":
    named.run(globals())
