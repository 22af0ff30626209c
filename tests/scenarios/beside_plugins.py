# SPDX-License-Identifier: Apache-2.0
"""A real model with prefill graphs beside other plugins, which SGLang calls before ours or after it."""

from __future__ import annotations

import sys
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.process import report
from tests import other_plugins
from tests.scenarios import debugged, named, released


def one_prefill(site: str, first: str) -> dict[str, Any]:
    # SGLang calls plugins in the order of the path
    sys.path.insert(0 if first == "theirs" else len(sys.path), site)
    loaded = released.load("falcon_h1")
    prompts = prefill._prompts([6, 5])
    eager, _ = one_batch.generate(loaded, prompts, 2)
    prefill.capture_prefill(loaded.model_runner)
    other_plugins.calls.clear()
    before = graphs.counters.replays
    tokens, _ = one_batch.generate(loaded, prompts, 2)
    process = plugin.load()
    found = process.report.read_back
    assert found is not None
    failed = process.report.ids(report.FAILED)
    return {
        "is_right": tokens == eager,
        "replays": graphs.counters.replays - before,
        "calls": other_plugins.calls,
        "applied": sorted(process.ledger.applied()),
        "live": sorted(found.live),
        "lost": found.lost,
        "wrapped": found.wrapped,
        "failed": {name: process.report.outcomes[name].detail for name in failed},
    }


if __name__ == "__main__":
    debugged.show()
    named.run(globals())
