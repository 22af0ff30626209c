# SPDX-License-Identifier: Apache-2.0
"""The server can hang in prefill: DP attention with --moe-a2a-backend megamoe (Kimi K3)

Symptom: With --enable-dp-attention and --moe-a2a-backend megamoe, a model with a dense layer, such as Kimi K3, hangs in
a prefill where one data parallel rank has no prompt, or the ranks have prompts that need graphs of different sizes.
Default flags otherwise.
Cause: MegaMoE's experts take any number of tokens from each rank, so each rank may replay a graph of its own size, or
run without one where it has no tokens. That holds for the experts alone: in a dense layer the tokens of all ranks are
gathered inside the graph, which takes the same size on all of them.
Change: Where a capture has gathered tokens of other ranks, the ranks replay graphs of one size, or none where a rank
has no tokens, as with other backends. Graphs without such a gather are replayed as before.
Remove when: No release before 0.5.20 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, MEGAMOE, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import EXECUTOR, PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed

TOLERATES = f"{EXECUTOR}.forward_batch_info:prefill_graph_tolerates_sum_len"
REFUSES = f"{PREFILL}._has_inactive_dp_rank"
CAPTURE = f"{PREFILL}._capture_one_stream"
PARALLEL = "sglang.srt.layers.dp_attention"
GATHER, SCATTER, SCATTER_SUM = (
    f"{PARALLEL}:{name}" for name in ("_dp_gather", "dp_scatter", "dp_reduce_scatter_tensor")
)


class Captures:
    """The state of this process: a prefill graph is being captured, and one that was has gathered tokens."""

    running = False
    gathered = False


CAPTURES = Captures()


def probe(source: Source) -> Finding:
    if not source.has_module(PREFILL_MODULE):
        return absent("prefill graphs of this release cannot be captured under DP attention")
    refuses = source.need(REFUSES)
    if TOLERATES.partition(":")[2] not in refuses.calls:
        return absent("all ranks replay graphs of one size", refuses)
    tolerates = source.need(TOLERATES)
    if tolerates.mentions("prefill_graph_has_dp_gather"):
        return fixed("a graph that gathers tokens is replayed in one size", tolerates, refuses)
    read = [
        tolerates,
        refuses,
        source.need(CAPTURE),
        source.need(GATHER),
        source.need(SCATTER),
        source.need(SCATTER_SUM),
    ]
    return affected("each rank replays a graph of its own size, also one that gathers tokens", *read)


def capture(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> Any:
    # the warm-up before this also gathers where the graph does not, for the logits
    CAPTURES.running = True
    try:
        return original(self, *arguments, **named)
    finally:
        CAPTURES.running = False


def note(*_: Any, **__: Any) -> None:
    if CAPTURES.running:
        CAPTURES.gathered = True


def tolerates(can_differ: bool) -> bool:
    return can_differ and not CAPTURES.gathered


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/37561",
        "https://github.com/sgl-project/sglang/pull/37933",
    ),
    probe=probe,
    patches=(
        PatchPoint((CAPTURE,), How.AROUND, capture),
        PatchPoint((GATHER,), How.BEFORE, note),
        PatchPoint((SCATTER,), How.BEFORE, note),
        PatchPoint((SCATTER_SUM,), How.BEFORE, note),
        PatchPoint((TOLERATES,), How.AFTER, tolerates),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(DP_ATTENTION, MEGAMOE, PREFILL_GRAPHS),
)
