# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 may answer wrongly on prefixes from host memory (HiCache, prefill graphs)

Symptom: With --enable-hierarchical-cache and breakable prefill graphs, which are opt-in for DeepSeek-V4, or come with
context parallelism, a prompt whose prefix is loaded from host memory is compressed and indexed from what was in those
slots before: wrong answers that depend on timing. Nothing in the log.
Cause: The host loads a prefix layer by layer on a stream of its own. A layer waits for its part when it asks the pool
for its buffers. Attention does so in its break. The compressors and the indexer of a layer ask before that break, in a
captured segment, and a replay runs no Python.
Change: After a batch has been filled in, the forward's stream waits for the last layer. Batches that load nothing wait
for nothing, and pools of other models still wait layer by layer.
Remove when: Every release that has to be served waits for these layers outside of the graph.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy import host_loads
from sglang_bcg_fixes.anatomy.launches import DEEPSEEK_V4, HOST_CACHE, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, wrong

MODEL = "sglang.srt.models.deepseek_v4"
BREAK, LAYER = f"{MODEL}:deepseek_v4_attention_with_output", f"{MODEL}:MQALayer._forward_prepare"
POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
FILL = (f"{PREFILL}.load_batch", f"{OLD_PREFILL}.replay_prepare")


def probe(source: Source) -> Finding:
    attention = source.find(BREAK)
    if attention is None:
        return absent("DeepSeek-V4 has no breaks in this release, so no such graphs")
    layer, waits = source.need(LAYER), source.need(host_loads.WAIT)
    states, asked = (source.need(f"{POOL}.{name}") for name in ("get_attention_compress_states", "wait_layer_transfer"))
    read = [layer.header, states, asked, waits, source.need(*FILL).header]
    awaited = source.find(f"{PREFILL}._wait_for_layer_loads")
    if awaited is not None:
        read.append(awaited)
        if not awaited.mentions("if not self._is_full_backend:"):
            return drifted("a replay waits for loads", *read)
    captured = "attn_backend.forward_core_compressor" in layer.calls and "self.wait_layer_transfer" in states.calls
    if captured and waits.mentions(host_loads.WAITS):
        return affected("compressors wait for their layer in a captured segment", *read)
    return drifted("compressors get their states", *read)


def wait(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    pool = self.model_runner.token_to_kv_pool
    # only pools of DeepSeek-V4 have that function
    if hasattr(pool, "wait_layer_transfer"):
        host_loads.wait_for_the_last_layer(pool)
    return result


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(FILL, How.AFTER, wait),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(DEEPSEEK_V4, HOST_CACHE, PREFILL_GRAPHS),
)
