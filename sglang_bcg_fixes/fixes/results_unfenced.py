# SPDX-License-Identifier: Apache-2.0
"""Rare wrong tokens under overlap scheduling, above all with sliding windows

Symptom: With overlap scheduling, above all in models with a sliding window, a step rarely attends to slot 0 or to slots
of another request: wrong tokens that no second run repeats. Nothing in the log; default flags.
Cause: What the scheduler does on the device waits for the running step at the top of its loop, for the step of the
previous round. After that it launches a step and processes the results of the one before, which writes rows of the
table of slots and clears entries of the mapping to a window's slots. Nothing keeps that behind the step's reads.
Change: The scheduler waits right after it has launched a step, on the same event, and not again at the top of its loop.
So what comes after that top waits no longer than before, and the processing of results waits as long as SGLang lets it
from 0.5.16.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import OVERLAP
from sglang_bcg_fixes.anatomy.read_done import BARRIER
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, unknown, wrong

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
LOOP, LAUNCH = f"{SCHEDULER}.event_loop_overlap", f"{SCHEDULER}.run_batch"
WAIT, NEXT, RUN = "self._apply_war_barrier()", "self.get_next_batch_to_run(", "self.run_batch("
# for each scheduler whose loop waits: has it waited since it launched a step
_has_waited: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def probe(source: Source) -> Finding:
    loop, launch = source.need(LOOP), source.need(LAUNCH)
    waits = loop.text.find(WAIT)
    if waits < 0:
        return absent("no step tells when it has read the tables: see schedule_writes_unfenced", loop)
    barrier = source.need(BARRIER)
    if waits < loop.text.index(NEXT):
        return affected("the scheduler waits before it launches a step, and not after", loop, barrier, launch.header)
    if loop.text.index(RUN) < waits:
        return fixed("the scheduler waits right after it has launched a step", loop, barrier)
    return unknown("the scheduler waits where no known release does", loop, barrier)


def wait(original: Callable[..., None], self: Any) -> None:
    if not _has_waited.setdefault(self, False):
        original(self)


def launched(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    # other loops, such as the one without overlap, have not asked to wait
    if self in _has_waited:
        _has_waited[self] = False
        self._apply_war_barrier()
        _has_waited[self] = True
    return result


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/31687",),
    probe=probe,
    patches=(
        PatchPoint((BARRIER,), How.AROUND, wait),
        PatchPoint((LAUNCH,), How.AFTER, launched),
    ),
    workarounds=NO_OVERLAP,
    verify=("gpt_oss_decode_padding",),
    concerns=wrong(OVERLAP),
)
