# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2 dies with --enable-two-batch-overlap; drafts with sliding windows may

Symptom: MiMo-V2 with --enable-two-batch-overlap stops with a shape mismatch in set_kv_buffer; a kernel that does not
compare the sizes would store one half's keys in the other half's slots. The same holds for draft models with a sliding
window, whose steps share one allocation of slots.
Cause: The slots of the sliding window pool are looked up once for a batch and left on the pool, which prefers them to
the slots it is called with. Two-batch overlap splits the slots of the batch but not these, and so do the steps of a
draft.
Change: When the number of prepared slots differs from that of the call, the pool looks up the call's slots, as it does
when nothing is prepared.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DRAFT_MODEL, TWO_BATCHES, WINDOW
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAPPING_HALVES
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, ends, fixed

POOL = "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool"
STORE = f"{POOL}.set_kv_buffer"


def probe(source: Source) -> Finding:
    store, setter = source.need(STORE), source.find(f"{POOL}.set_swa_loc")
    if setter is None:
        return fixed("the pool keeps no slots of a batch", store.header)
    if store.mentions("loc = self.swa_loc"):
        return affected("the pool prefers the slots of the last whole batch to those it is called with", store, setter)
    return drifted("the pool finds its slots", store, setter)


def look_up_those_of_the_call(
    original: Callable[..., Any], self: Any, layer: Any, loc: Any, *args: Any, **kwargs: Any
) -> Any:
    prepared = self.swa_loc
    if prepared is None or len(prepared) == len(loc):
        return original(self, layer, loc, *args, **kwargs)
    self.swa_loc = None
    try:
        return original(self, layer, loc, *args, **kwargs)
    finally:
        self.swa_loc = prepared


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((STORE,), How.AROUND, look_up_those_of_the_call),),
    workarounds=NO_OVERLAPPING_HALVES,
    verify=("gpt_oss_decode_padding",),
    concerns=ends(WINDOW, TWO_BATCHES | DRAFT_MODEL),
)
