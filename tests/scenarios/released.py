# SPDX-License-Identifier: Apache-2.0
"""The beginning of a scenario beside a release, without a GPU: a model as a server loads it."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch


def load(model: str, **server_args: Any) -> one_batch.LoadedModel:
    """A small model with random weights, after SGLang has loaded the plugins."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load(model, **server_args)
    one_batch.randomize(loaded.model_runner.model)
    return loaded
