"""For code in a process of its own beside a release: a small model on the real runner, with a fix and then without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def load(**server_args: Any) -> Any:
    """The model with random weights, after SGLang has loaded the plugin."""
    from cpu_sglang import one_batch

    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load("llama", **server_args)
    one_batch.randomize(loaded.model_runner.model)
    return loaded


def tell_with_and_without(act: Callable[[], Any], **beside: Any) -> None:
    """Print what the act gives with the fixes that are applied, and what it gives when they have been undone."""
    from sglang_bcg_fixes import plugin

    ledger = plugin.load().ledger
    found = {**beside, "applied": ledger.applied(), "with": act()}
    for name in found["applied"]:
        ledger.undo(name)
    print("RESULT", json.dumps({**found, "without": act()}))
