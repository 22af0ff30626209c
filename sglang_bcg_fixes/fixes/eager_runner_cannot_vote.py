# SPDX-License-Identifier: Apache-2.0
"""The first prompt ends the server: --enable-dp-attention with --enable-lora

Symptom: With --enable-dp-attention and --enable-lora the server starts, and its first prompt ends it: "'EagerRunner'
object has no attribute 'can_replay_locally'". So does one without LoRA whose prefill graphs were left out because
memory is short (0.5.17), or because every size given with --cuda-graph-bs-prefill is too large. Default flags.
Cause: Before each step, the ranks vote on replaying the prefill graph. The scheduler asks whatever serves as prefill
runner as soon as the flags allow breakable graphs. Where none could be captured that is the eager runner, which does
not have the question's method.
Change: The eager runner has that method, and votes against a replay: all ranks prefill eagerly, as they would have to.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, LITTLE_MEMORY, LORA, PREFILL_SIZES
from sglang_bcg_fixes.anatomy.runners import EAGER
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed

SCHEDULER = "sglang.srt.managers"
SYNC = f"{SCHEDULER}.scheduler_components.dp_attn"
# newer location first
VOTES = (
    f"{SYNC}:_local_prefill_cuda_graph_vote",
    f"{SYNC}:prepare_mlp_sync_batch_raw",
    f"{SCHEDULER}.scheduler_dp_attn_mixin:prepare_mlp_sync_batch_raw",
)
QUESTION = "can_replay_locally"


def probe(source: Source) -> Finding:
    vote = source.need(*VOTES)
    if not vote.mentions(QUESTION):
        return absent("the vote on prefill graphs asks no runner", vote)
    if vote.mentions("not isinstance(prefill_graph_runner, PrefillCudaGraphRunner)"):
        return fixed("the vote asks only a runner that has graphs", vote)
    if source.find(f"{EAGER}.{QUESTION}"):
        return fixed("the eager runner can be asked for its vote", vote)
    return affected(
        "the vote asks the eager runner, which cannot answer", vote, source.need(f"{EAGER}.__init__").header
    )


def vote_against(nothing: None, self: Any, *_: Any, **__: Any) -> None:
    setattr(self, QUESTION, lambda **batch: False)
    # read to ask that question, and nowhere else
    self.enable_lora = False


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{EAGER}.__init__",), How.AFTER, vote_against),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(DP_ATTENTION, LORA | PREFILL_SIZES | LITTLE_MEMORY),
)
