# SPDX-License-Identifier: Apache-2.0
"""Rare wrong answers on prefixes from host memory (HiCache under overlap scheduling)

Symptom: With --enable-hierarchical-cache, a prompt whose prefix is loaded from host memory attends to a wrong key and
value, above all those of the last token of an earlier answer: wrong answers that depend on timing. Nothing in the log.
Cause: The scheduler processes the results of a step while it runs the next one. That one still writes the last token of
each request that has just finished. The request is cached and copied to the host at once. The copy waits for what the
scheduler has done, and not for that step. Up to 0.5.18 a prefix may also be loaded into slots that such a request has
given back, and the step then writes to them.
Change: The stream of a copy first waits for the steps launched so far, as SGLang's own does from 0.5.23, and for loads
from 0.5.19. A load no longer runs beside the step before it; later steps run beside the copy. The scheduler waits no
longer, unless it waits for the copy itself, as with --hicache-write-policy write_back. Without overlap scheduling
nothing changes. Copies of retracted requests are left as they are, also by SGLang.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import HOST_CACHE, OVERLAP
from sglang_bcg_fixes.anatomy.workarounds import HOST_CACHE_OFF, NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, wrong

RUN = "sglang.srt.managers.scheduler:Scheduler.run_event_loop"
CONTROLLER = "sglang.srt.managers.cache_controller:HiCacheController"
# up to 0.5.17 it copies by itself
HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
WRITES, LOADS = (tuple(f"{of}.{name}" for of in (CONTROLLER, HYBRID)) for name in ("start_writing", "start_loading"))
# how a copy is submitted, and what it waits for where SGLang lets it
WRITTEN = ("start_event.wait(self.write_stream)", "self.l2_transfer_engine.submit_device_to_host(")
LOADED = ("start_event.wait(self.load_stream)", "self.l2_transfer_engine.submit_host_to_device(")
WRITE_FENCE, LOAD_FENCE = "wait_stream(self.write_fence_stream)", "wait_stream(self.load_fence_stream)"
# for the controller of a prefix cache: the stream of the steps that its overlapped scheduler launches
_steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def probe(source: Source) -> Finding:
    run = source.need(RUN)
    writes, loads = ([source.need(base), *filter(None, [source.find(own)])] for base, own in (WRITES, LOADS))
    if len(writes) != len(loads):
        return drifted("hybrid models copy", run, *writes, *loads)
    if not all(any(map(write.mentions, WRITTEN)) for write in writes):
        return drifted("keys are copied to the host", run, *writes)
    if not all(any(map(load.mentions, LOADED)) for load in loads):
        return drifted("keys are loaded from the host", run, *loads)
    if not any(needed(source) for needed in UNFENCED.values()):
        return fixed("copies wait for the steps launched so far", *writes, *loads)
    return affected("copies wait for the scheduler, and not for the steps launched so far", run, *writes, *loads)


def lacks(where: str, fence: str) -> Callable[[Source], bool]:
    def needed(source: Source) -> bool:
        found = source.find(where)
        return found is not None and not found.mentions(fence)

    return needed


UNFENCED = {
    where: lacks(where, fence) for places, fence in ((WRITES, WRITE_FENCE), (LOADS, LOAD_FENCE)) for where in places
}


def note_steps(self: Any) -> None:
    # a session's cache may stand before the one with a controller
    cache = getattr(self.tree_cache, "inner", self.tree_cache)
    controller = getattr(cache, "cache_controller", None)
    if controller is not None and self.enable_overlap:
        _steps[controller] = self.forward_stream


def write_behind_steps(self: Any) -> None:
    if self.write_queue:
        wait_for_steps(self, "write_stream", "device_to_host_stream")


def load_behind_steps(self: Any) -> None:
    if self.load_queue:
        wait_for_steps(self, "load_stream", "host_to_device_stream")


def wait_for_steps(controller: Any, own: str, of_engine: str) -> None:
    # other controllers, such as that of a decode server, copy nothing that a step writes
    steps = _steps.get(controller)
    if steps is not None:
        stream = getattr(controller, own, None) or getattr(controller.l2_transfer_engine, of_engine)
        stream.wait_stream(steps)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/pull/20611",
        "https://github.com/sgl-project/sglang/pull/36738",
    ),
    probe=probe,
    patches=(
        PatchPoint((RUN,), How.BEFORE, note_steps),
        *(PatchPoint((where,), How.BEFORE, write_behind_steps, needed=UNFENCED[where]) for where in WRITES),
        *(PatchPoint((where,), How.BEFORE, load_behind_steps, needed=UNFENCED[where]) for where in LOADS),
    ),
    workarounds=HOST_CACHE_OFF + NO_OVERLAP,
    verify=("llama_host_memory",),
    concerns=wrong(HOST_CACHE, OVERLAP),
)
