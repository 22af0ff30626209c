# SPDX-License-Identifier: Apache-2.0
"""Slower: now and then fewer drafts accepted (EAGLE with overlap scheduling)

Symptom: With EAGLE and overlap scheduling, a draft rarely attends to slots of another request, so that fewer of its
tokens are accepted. FlashAttention 3, the default on Hopper, from 0.5.16; TensorRT-LLM's attention and DeepSeek-V4 from
0.5.15. Nothing in the log; default flags.
Cause: Once a step has read the tables of slots, the scheduler may write them. The graph runner of the draft's last step
records that moment in an event before the replay, and from 0.5.15 the graph begins with reading the tables.
Change: The event is recorded again after the replay of a graph that prepares its metadata itself. What the scheduler
then does on the device waits for that graph, as it does for every prefill, and as SGLang does from 0.5.22.
Remove when: No release before 0.5.22 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DEEPSEEK_V4, DRAFT_MODEL, FLASH_ATTENTION, OVERLAP, TRTLLM
from sglang_bcg_fixes.anatomy.read_done import BARRIER, DECLARED, IN_GRAPH, RECORDED, preparing_in_graph, record_again
from sglang_bcg_fixes.anatomy.runners import DECODE_MODULE, DRAFT_EXTEND
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, slower, unknown

EXECUTE, CAPTURE = f"{DRAFT_EXTEND}.execute", f"{DRAFT_EXTEND}.capture_one_shape"


def probe(source: Source) -> Finding:
    if not source.has_module(DECODE_MODULE):
        return absent("the scheduler waits for no event of a runner")
    barrier = source.need(BARRIER)
    execute, capture = source.need(EXECUTE), source.need(CAPTURE)
    if not capture.mentions(IN_GRAPH):
        return absent("the graph is captured without the metadata", execute, capture)
    if execute.mentions(RECORDED):
        return affected("the event is recorded before the replay, whatever that reads", execute, capture, barrier)
    if execute.mentions(DECLARED):
        return fixed("the event is recorded after a replay that reads the tables", execute, capture, barrier)
    return unknown("the event is recorded where no known release does", execute, capture, barrier)


def execute(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    if any(True for _ in preparing_in_graph(self.draft_extend_attn_backend)):
        record_again(self.model_runner)
    return result


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/36335",),
    probe=probe,
    patches=(PatchPoint((EXECUTE,), How.AFTER, execute),),
    workarounds=NO_OVERLAP,
    verify=("eagle_triton_draft_extend",),
    concerns=slower(DRAFT_MODEL, OVERLAP, FLASH_ATTENTION | TRTLLM | DEEPSEEK_V4),
)
