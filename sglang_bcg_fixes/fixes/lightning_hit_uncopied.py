# SPDX-License-Identifier: Apache-2.0
"""Ling 2.5 and Ring 2.5 answer wrongly on every prefix-cache hit, with default flags

Symptom: Ling 2.5 and Ring 2.5 answer a prompt that begins like an earlier one as if its beginning were another text:
every request that finds a prefix in the cache is wrong, with all flags but --disable-radix-cache. Nothing in the log.
Cause: The scheduler leaves it to the attention backend to copy the cached state into the slot of the request, and to
clear the slot of a request without one. LightningAttentionBackend prepares a prefill itself and never does, while all
other backends of linear attention do.
Change: The backend copies and clears before it prepares a prefill, by the method that the others inherit.
Remove when: No release before 0.5.15 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import LIGHTNING_LAYERS, PREFIX_CACHE
from sglang_bcg_fixes.anatomy.workarounds import PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import (
    Finding,
    Fix,
    How,
    PatchPoint,
    Source,
    absent,
    affected,
    drifted,
    fixed,
    unknown,
    wrong,
)

LIGHTNING = "sglang.srt.layers.attention.linear.lightning_backend:LightningAttentionBackend"
COPY = "_execute_deferred_mamba_cow_and_clear"
SHARED = f"sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase.{COPY}"
OF_THE_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner._maybe_execute_deferred_mamba_cow_and_clear"
COLLECT = "sglang.srt.managers.schedule_batch:ScheduleBatch._collect_deferred_mamba_cow_and_clear"


def probe(source: Source) -> Finding:
    prepare = source.need(f"{LIGHTNING}.init_forward_metadata")
    of_the_runner, shared = source.find(OF_THE_RUNNER), source.find(SHARED)
    if of_the_runner:
        return fixed("the model runner copies the states for all backends", of_the_runner.header)
    if shared is None:
        if source.find(COLLECT):
            return unknown("states are copied by something that no known release has", prepare)
        return absent("the scheduler copies the states itself", prepare)
    if {f"self.{COPY}", "super().init_forward_metadata"} & prepare.calls:
        return fixed("the backend copies the states before it prepares a prefill", prepare, shared)
    if "self._forward_metadata" in prepare.calls:
        return affected("the backend prepares a prefill and copies no states", prepare, shared)
    return drifted("the backend prepares a prefill", prepare, shared)


def copy_states(self: Any, forward_batch: Any) -> None:
    self._execute_deferred_mamba_cow_and_clear(forward_batch)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29945",),
    probe=probe,
    patches=(PatchPoint((f"{LIGHTNING}.init_forward_metadata",), How.BEFORE, copy_states),),
    workarounds=PREFIX_CACHE_OFF,
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(LIGHTNING_LAYERS, PREFIX_CACHE),
)
