# SPDX-License-Identifier: Apache-2.0
"""Wrong answers on prefixes loaded by HiCache or LMCache (full prefill graphs, Inkling)

Symptom: With --enable-hierarchical-cache, and prefill graphs without breaks as Inkling has them by default and others
with --cuda-graph-backend-prefill full, a prompt whose prefix is loaded from host memory attends to what was in those
slots before: wrong answers that depend on timing. Nothing in the log. With --enable-lmcache in place of the first flag
(0.5.15 to 0.5.20, where LMCache runs in the server's process), all layers but the first do so, whatever the timing.
Cause: The host loads a prefix layer by layer on a stream of its own. A layer waits for its part when it asks the pool
for its buffers. That is Python, which a replay does not run; only breaks do. LMCache even begins to load a layer when
that before it is waited for.
Change: After a batch has been filled in, the forward's stream waits for the last layer, and with LMCache for one after
the other. Batches that load nothing wait for nothing, and breakable graphs still wait layer by layer.
Remove when: No release before 0.5.23 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy import host_loads
from sglang_bcg_fixes.anatomy.launches import FULL_PREFILL_GRAPHS, HOST_CACHE, INKLING, flag
from sglang_bcg_fixes.anatomy.runners import EXECUTOR, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

BACKENDS = f"{EXECUTOR}.runner_backend.utils"
LAYER_BY_LAYER = "sglang.srt.mem_cache.storage.lmcache.lmc_radix_cache"


def probe(source: Source) -> Finding:
    if not source.has_module(BACKENDS):
        return absent("every prefill graph of this release has breaks")
    resolve = source.need(f"{BACKENDS}:resolve_prefill_backend")
    if "FullCudaGraphBackend" not in resolve.calls:
        return absent("every prefill graph of this release has breaks", resolve)
    execute, wait = source.need(f"{PREFILL}.execute"), source.need(host_loads.WAIT)
    if not wait.mentions(host_loads.WAITS):
        return drifted("layers that are loaded are awaited", resolve, execute, wait)
    if "self._wait_for_layer_loads" in execute.calls:
        awaited = source.need(f"{PREFILL}._wait_for_layer_loads")
        return fixed("a replay without breaks waits for the last layer", resolve, execute, awaited)
    if "self.load_batch" in execute.calls:
        return affected("a replay without breaks waits for no layer", resolve, execute, wait)
    return drifted("a batch is filled in and replayed", resolve, execute)


def wait(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    if self._is_full_backend:
        host_loads.wait_for_every_layer(self.model_runner.token_to_kv_pool)
    return result


def loads_by_lmcache(launch: Launch) -> bool | None:
    return flag("--enable-lmcache")(launch) if launch.source.has_module(LAYER_BY_LAYER) else False


LMCACHE = Condition("LMCache", loads_by_lmcache)
FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{PREFILL}.load_batch",), How.AFTER, wait),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(HOST_CACHE | LMCACHE, FULL_PREFILL_GRAPHS | INKLING),
)
