# SPDX-License-Identifier: Apache-2.0
"""Metrics of a real runner of prefill graphs that is asked for batches of every length."""

from __future__ import annotations

import os
import tempfile
import types
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from tests.scenarios import named, released

LENGTHS = ([6], [11], [40], [3, 4])


def reasons(adapters: str) -> list[Any]:
    """The reasons, their states beside the report's, and if anything was replayed."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
    loaded = released.load("llama", enable_metrics=True)
    runner = loaded.model_runner
    prefill.capture_prefill(runner)
    if adapters == "lora":
        runner.server_args.enable_lora = True
        runner.lora_manager = types.SimpleNamespace(fetch_new_loras=does_nothing, prepare_lora_batch=does_nothing)
    before = graphs.counters.replays
    for lengths in LENGTHS:
        one_batch.generate(loaded, prefill._prompts(lengths), 1)
    from prometheus_client import CollectorRegistry, multiprocess

    from sglang_bcg_fixes import plugin

    registry: Any = CollectorRegistry()
    collector: Any = multiprocess.MultiProcessCollector
    collector(registry)
    samples = [sample for family in registry.collect() for sample in family.samples]
    found = {s.labels["reason"]: s.value for s in samples if s.name == "sglang_bcg_prefill_fallbacks_total"}
    states = {s.labels["fix"]: s.labels["state"] for s in samples if s.name == "sglang_bcg_fix_state" and s.value}
    return [found, states == plugin.load().report.states(), graphs.counters.replays > before]


def does_nothing(*_: Any) -> None:
    pass


if __name__ == "__main__":
    named.run(globals())
