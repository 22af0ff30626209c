# SPDX-License-Identifier: Apache-2.0
"""A small Llama on a release's real runner."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch


def load(**server_args: Any) -> one_batch.LoadedModel:
    """The model with random weights, after SGLang has loaded the plugin."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load("llama", **server_args)
    one_batch.randomize(loaded.model_runner.model)
    return loaded
