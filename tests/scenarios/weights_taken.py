# SPDX-License-Identifier: Apache-2.0
"""Tiny models, each loaded in a process of its own. Argument: their folders by name, as JSON."""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling


def attention_backend(name: str) -> str:
    return "fa3" if "linear" in name else "triton" if "oss" in name else "torch_native"


def load(name: str, folder: str) -> dict[str, Any]:
    """Load it, and count the values that the checkpoint has filled and the parameters that it has not."""
    from sglang.srt.model_loader import loader

    vars(torch.cuda)["Stream"] = lambda *_, **__: None
    one_batch.load_plugins()
    found: dict[str, Any] = {"taken": 0, "missing": []}

    # no model can forget one of these: each parameter starts as not a number
    def load_weights(model: Any, weights: Any, device: Any, *_: Any, **__: Any) -> None:
        parameters = [p for p in model.parameters() if p.dtype.is_floating_point]
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
        model.load_weights(weights)
        found["taken"] = sum(int((~p.isnan()).sum()) for p in parameters)
        found["missing"] = [n for n, p in model.named_parameters() if p.dtype.is_floating_point and p.isnan().any()]

    loader.DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_weights)
    options = {"attention_backend": attention_backend(name)}
    if name.endswith(" as draft"):
        options["json_model_override_args"] = json.dumps({"architectures": ["Qwen3NextForCausalLMMTP"]})
    try:
        one_batch.load(
            name,
            model_path=folder,
            load_format="auto",
            dtype="bfloat16",
            max_total_tokens=1024,
            context_length=256,
            **options,
        )
    except Exception as error:
        # the model was loaded; what a machine without a GPU lacks comes behind
        found["error"] = repr(error)
    return found


def main(wanted: dict[str, str]) -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch._import_benchmark()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(load, wanted.items(), chunksize=1)
    telling.result(dict(zip(wanted, found, strict=True)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
