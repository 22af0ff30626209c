# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek, or with `--sarvam` Sarvam, under breakable graphs; with `--undo` once more without the fix."""

from __future__ import annotations

import sys
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.engine import graph_break
from tests.harm import forked_rows, matrix
from tests.scenarios import small_deepseek, telling
from tests.scenarios.small_deepseek import PROMPTS

ID = "mla_replay_prepared_as_mha"


def plans() -> dict[str, list[Any]]:
    outside = small_deepseek.planned_by_tensorrt()
    with graph_break.load("context").enable_breakable_cuda_graph():
        return {"eager": outside, "under a graph": small_deepseek.planned_by_tensorrt()}


def sarvam() -> one_batch.LoadedModel:
    """The other model with an expanded form, which does not ask SGLang's handlers."""
    one_batch.import_sglang(with_graphs=True)
    loaded = forked_rows.load(matrix.job("SarvamMLAForCausalLM", "stock"))
    forked_rows.prepare(loaded.model_runner.model)
    return loaded


def main() -> None:
    loaded = sarvam() if "--sarvam" in sys.argv else small_deepseek.load()
    tokens, logits = one_batch.generate(loaded, PROMPTS, 3)
    runner = prefill.capture_prefill(loaded.model_runner, (8, 16))
    # as on an NVIDIA GPU: where it is false, captures are taken to be of the expanded form
    vars(sys.modules[type(runner).__module__])["is_cuda"] = lambda: True
    ledger = plugin.load().ledger
    found: dict[str, Any] = {"applied": ID in ledger.applied()}
    again, replayed = one_batch.generate(loaded, PROMPTS, 3)
    found["same"], found["off"] = again == tokens, (replayed - logits).abs().max().item()
    found["replays"] = graphs.counters.replays
    if "--undo" in sys.argv:
        found["plans"] = plans()
        ledger.undo(ID)
        found["stock plans"] = plans()
        try:
            one_batch.generate(loaded, PROMPTS, 3)
        except RuntimeError as error:
            found["error"] = str(error)
    telling.result(found)


if __name__ == "__main__":
    main()
