# SPDX-License-Identifier: Apache-2.0
"""Rare wrong tokens under overlap scheduling, above all with windows or disaggregation

Symptom: With overlap scheduling, above all in models with a sliding window and in disaggregated serving, a step rarely
attends to slots of another request: wrong tokens that no second run repeats. Upstream saw DeepSeek-V4's GSM8K fall
below 0.93 in every other run. Nothing in the log; default flags.
Cause: Steps run on one stream, and the scheduler writes the table of slots and the mapping to a window's slots on
another. Up to 0.5.12.post1 the second never waits for the first. From 0.5.13 it waits once in each round, before the
next step is chosen, so that results are still processed beside a step that was just launched. Nobody has seen it
without windows, Mamba layers, speculative decoding, or keys that come from elsewhere, such as HiCache's. There, a row
written beside a step belongs to a request that has ended or was retracted, or names other slots with the same keys.
Change: None; this version only watches for it. From 0.5.14 the steps say when they have read the tables, and
results_unfenced has the scheduler wait for that. Here it could only wait for whole steps, which cost SGLang 4 % until
it had moved other waits out of the way.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import (
    DEEPSEEK_V4,
    HOST_CACHE,
    HYBRID,
    KEYS_FROM_ELSEWHERE,
    OVERLAP,
    SPECULATION,
    WINDOW,
)
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, Source, affected, drifted, fixed, possible, wrong

LOOP = "sglang.srt.managers.scheduler:Scheduler.event_loop_overlap"
WAIT, WAIT_FOR_READS = "self.schedule_stream.wait_stream(self.forward_stream)", "self._apply_war_barrier()"


def probe(source: Source) -> Finding:
    loop = source.need(LOOP)
    if loop.mentions(WAIT_FOR_READS):
        return fixed("the scheduler waits until a step has read the tables", loop)
    if loop.mentions(WAIT):
        return affected("the scheduler waits before it chooses a step, and not after it has launched it", loop)
    if loop.mentions("batch_result = self.run_batch(batch)"):
        return affected("the scheduler never waits for a step", loop)
    return drifted("the scheduler launches steps", loop)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/26380", "https://github.com/sgl-project/sglang/pull/31687"),
    probe=probe,
    workarounds=NO_OVERLAP,
    concerns=wrong(OVERLAP, WINDOW | DEEPSEEK_V4 | HYBRID | SPECULATION | HOST_CACHE | KEYS_FROM_ELSEWHERE)
    + possible(OVERLAP),
)
