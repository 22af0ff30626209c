"""The beginning of a scenario beside a release, without a GPU: what a server imports and loads before anything runs."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch, stand_ins


def with_plugins() -> None:
    """Load the plugins through SGLang's own loader, as a process does that runs no model."""
    stand_ins.install()
    one_batch.load_plugins()


def load(model: str, *, with_graphs: bool = True, **server_args: Any) -> one_batch.LoadedModel:
    """A small model with random weights, after SGLang has loaded the plugins."""
    one_batch.import_sglang(with_graphs=with_graphs)
    one_batch.load_plugins()
    loaded = one_batch.load(model, **server_args)
    one_batch.randomize(loaded.model_runner.model)
    return loaded
