# SPDX-License-Identifier: Apache-2.0
"""Intermittent wrong answers or a crash: DP attention with explicit breakable graphs

Symptom: With --enable-dp-attention, intermittent wrong answers or "illegal memory access", once that memory has been
reused. Only with --cuda-graph-backend-prefill breakable: by default DP attention turns breakable prefill graphs off.
Cause: Capture makes a tensor of each rank's token count. Where ranks gather and scatter, every replay of the graph
computes from it which rows are its own; but nothing holds that tensor once the capture is over.
Change: The runner keeps the batch that each graph was captured with, as SGLang itself does from 0.5.17.
Remove when: No release before 0.5.17 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, DP_ATTENTION
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL_MODULE, PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, wrong

KEPT = "bcg_fixes_captured_batches"


def probe(source: Source) -> Finding:
    if source.has_module(OLD_PREFILL_MODULE):
        return absent("the prefill graphs of this release are captured without counts of other ranks")
    counts = source.need(f"{PREFILL}.capture_prepare").need_assignment_to("num_tokens_tensor")
    capture = source.need(f"{PREFILL}.capture_one_shape")
    if capture.mentions("capture_inputs="):
        return fixed("the batch of a capture is kept for its graph", capture, counts)
    return affected("nothing holds the counts that a graph reads", capture, counts)


def keep_the_batch(original: Callable[..., Any], self: Any, num_tokens: int) -> Any:
    batch, backend = original(self, num_tokens)
    if batch.global_num_tokens_gpu is not None:
        vars(self).setdefault(KEPT, {})[num_tokens] = batch
    return batch, backend


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{PREFILL}.capture_prepare",), How.AROUND, keep_the_batch),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(DP_ATTENTION, ASKED_FOR),
)
