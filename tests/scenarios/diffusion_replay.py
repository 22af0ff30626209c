# SPDX-License-Identifier: Apache-2.0
"""A tiny diffusion LLM whose batches replay prefill graphs, as they do where no decode graph takes them.

`together` finishes the blocks of all its requests before it goes on, `apart` lets each request go on by itself.
"""

from __future__ import annotations

import sys
from typing import Any

from cpu_sglang import graphs, one_batch, prefill, scheduler
from sglang_bcg_fixes import plugin
from tests.scenarios import telling

ID = "full_logits_dropped"
BUCKETS = (8, 16)
# blocks of four: one fills a graph with both, the other leaves padding
PROMPTS = {1: [3, 4, 5, 6, 7, 8], 2: [10, 11, 12, 13, 14, 15]}


def compared(of: scheduler.Scheduler) -> None:
    requests = {f"request {number}": prompt for number, prompt in PROMPTS.items()}
    one = {"request": PROMPTS[1]}
    eager = [of.tokens(asked, 8) for asked in (requests, one)]
    prefill.capture_prefill(of.scheduler.tp_worker.model_runner, BUCKETS)
    found: dict[str, Any] = {"applied": ID in plugin.load().ledger.applied()}
    try:
        found["same"] = [of.tokens(asked, 8) for asked in (requests, one)] == eager
    except (AttributeError, TypeError) as error:
        found["error"] = str(error)
    telling.result({**found, "answered": all(eager), "replays": graphs.counters.replays})


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    with prefill.built_for_graphs(BUCKETS):
        scheduler.run(compared, "sdar", dllm_algorithm="LowConfidence", dllm_fdfo="apart" in sys.argv)


if __name__ == "__main__":
    main()
