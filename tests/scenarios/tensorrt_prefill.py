# SPDX-License-Identifier: Apache-2.0
"""The prefill backend that SGLang chooses for models on TensorRT-LLM's latent attention, without flags about graphs."""

from __future__ import annotations

import importlib
import json
import pathlib
import tempfile

from cpu_sglang import architectures, one_batch
from tests.harm.forked_rows import register
from tests.releases import registry_graphs
from tests.scenarios import named


def by_default(*models: str) -> dict[str, str]:
    one_batch.import_sglang(with_graphs=True)
    # elsewhere SGLang refuses this attention
    for module in ("sglang.srt.server_args", "sglang.srt.arg_groups.overrides", "sglang.srt.utils.common"):
        for name in ("is_sm100_supported", "is_blackwell_supported"):
            if hasattr(loaded := importlib.import_module(module), name):
                setattr(loaded, name, lambda *_: True)
    found = {}
    for model in models:
        config = architectures.CONFIGURATIONS[model].config
        register(config["model_type"])
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps({**config, "architectures": [model]}))
            found[model] = registry_graphs.chosen(folder, attention_backend="trtllm_mla")
    return found


if __name__ == "__main__":
    named.run(globals())
