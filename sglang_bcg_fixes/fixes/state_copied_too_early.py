# SPDX-License-Identifier: Apache-2.0
"""Hybrid models answer wrongly on cache hits of prompts prefilled in chunks (extra_buffer)

Symptom: Qwen3-Next, Qwen3.5, Kimi-Linear and other hybrid models with the extra-buffer strategy of the Mamba prefix
cache answer wrong wherever a prefix is found whose prompt was computed in pieces (--chunked-prefill-size), and now and
then where a request started while another one ended. Nothing in the log.
Cause: With overlap, the scheduler copies and clears states on its own CUDA stream while a step is in flight on that of
the layers, and nothing makes the one wait for the other. Between two pieces of a prompt it copies the checkpoint that
the first one is still to write. A slot that it clears or fills for a new request may belong to a request that has
ended, for which the step in flight writes once more.
Change: The scheduler's stream waits for that of the layers before each such copy and each clearing. The host waits only
where it asks for a result, so planning a batch with new prompts overlaps less with the step before it.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, HYBRID, OVERLAP
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, NO_OVERLAP, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, unknown, wrong

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
POOL = "sglang.srt.mem_cache.memory_pool:MambaPool"
DEFERRED = "sglang.srt.managers.schedule_batch:ScheduleBatch._collect_deferred_mamba_cow_and_clear"
# on the pool: the stream of the layers
STREAM = "bcg_fixes_forward_stream"


def probe(source: Source) -> Finding:
    deferred = source.find(DEFERRED)
    if deferred:
        return fixed("states are copied and cleared on the stream of the layers", deferred.header)
    overlap, run = source.need(f"{SCHEDULER}.init_overlap"), source.need(f"{SCHEDULER}.run_batch")
    fork, alloc = source.need(f"{POOL}.fork_from"), source.need(f"{POOL}.alloc")
    read = (overlap, run, source.need(f"{POOL}.copy_from"), fork, alloc)
    if not (fork.mentions("self.copy_from(src_index, dst_index)") and alloc.mentions("t[:, select_index] = z")):
        return drifted("states are copied and cleared", *read)
    if not overlap.mentions("self.device_module.stream(self.forward_stream)"):
        return unknown("the layers have no stream of their own that is known", *read)
    return affected("states are copied and cleared while a step in flight may write them", *read)


def tell_the_pool(result: None, self: Any) -> None:
    pool = getattr(self.req_to_token_pool, "mamba_pool", None)
    if self.enable_overlap and pool is not None:
        setattr(pool, STREAM, self.forward_stream)


def wait_for_the_layers(self: Any, *_: Any, **__: Any) -> None:
    import torch

    stream = getattr(self, STREAM, None)
    if stream is not None:
        torch.get_device_module(self.device).current_stream().wait_stream(stream)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/issues/24221", "https://github.com/sgl-project/sglang/pull/24954"),
    probe=probe,
    patches=(
        PatchPoint((f"{SCHEDULER}.init_overlap",), How.AFTER, tell_the_pool),
        PatchPoint((f"{POOL}.copy_from",), How.BEFORE, wait_for_the_layers),
        PatchPoint((f"{POOL}.alloc",), How.BEFORE, wait_for_the_layers),
    ),
    workarounds=(*NO_OVERLAP, *CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(HYBRID, EXTRA_BUFFERS, OVERLAP),
)
