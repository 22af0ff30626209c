# SPDX-License-Identifier: Apache-2.0
"""Rare wrong tokens under overlap scheduling (TensorRT-LLM attention, DeepSeek-V4)

Symptom: With overlap scheduling, a decode rarely attends to slots of another request: wrong tokens that no second run
repeats. TensorRT-LLM's attention, the default on Blackwell, from 0.5.15; DeepSeek-V4 from 0.5.14; MiniMax-M3 from
0.5.16, where only a cached prefix may be wrong. Nothing in the log; default flags.
Cause: Once a step has read the tables of slots, the scheduler may write them: rows for new tokens and for what it puts
into the prefix cache, and the mapping to a sliding window's slots. The decode graph runner records that moment in an
event before the replay, and these backends read the tables inside the graph, to prepare their metadata. MiniMax-M3's
sparse layers read them one after the other.
Change: The event is recorded again after the replay of a graph that prepares its metadata itself. What the scheduler
then does on the device waits for that graph, as it does for every prefill. Other backends keep the early event.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DEEPSEEK_V4, MINIMAX_M3, OVERLAP, TRTLLM
from sglang_bcg_fixes.anatomy.read_done import BARRIER, DECLARED, RECORDED, preparing_in_graph, record_again
from sglang_bcg_fixes.anatomy.runners import DECODE, DECODE_MODULE
from sglang_bcg_fixes.anatomy.workarounds import NO_OVERLAP
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, fixed, unknown, wrong

EXECUTE = f"{DECODE}.execute"
# what they prepare in a graph is for other steps
IDLE = frozenset({"FlashAttentionBackend"})


def probe(source: Source) -> Finding:
    if not source.has_module(DECODE_MODULE):
        return absent("the scheduler waits for no event of a runner")
    barrier = source.need(BARRIER)
    execute = source.need(EXECUTE)
    if execute.mentions(RECORDED):
        return affected("the event is recorded before the replay, whatever that reads", execute, barrier)
    if execute.mentions(DECLARED):
        return fixed("each backend says where its reads end, and the event is recorded there", execute, barrier)
    return unknown("the event is recorded where no known release does", execute, barrier)


def execute(result: Any, self: Any, *_: Any, **__: Any) -> Any:
    if any(type(backend).__name__ not in IDLE for backend in preparing_in_graph(self.attn_backend)):
        record_again(self.model_runner)
    return result


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/33587",),
    probe=probe,
    patches=(PatchPoint((EXECUTE,), How.AFTER, execute),),
    workarounds=NO_OVERLAP,
    verify=("gpt_oss_decode_padding",),
    concerns=wrong(OVERLAP, TRTLLM | DEEPSEEK_V4 | MINIMAX_M3),
)
