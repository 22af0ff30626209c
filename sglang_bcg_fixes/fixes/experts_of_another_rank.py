# SPDX-License-Identifier: Apache-2.0
"""Returned routed experts are other tokens', or the scheduler dies (DP attention)

Symptom: With --enable-dp-attention and --enable-return-routed-experts, the experts returned for a prompt are those of
another rank's tokens or of padding, on every data parallel rank but the first; before the first decode replay,
"unsupported operand type(s) for *: 'int' and 'NoneType'" ends the scheduler. The answers are right: it is training with
routing replay that learns from wrong experts. Without an all-to-all backend for the experts; from 0.5.17 with default
flags, before that with --cuda-graph-backend-prefill breakable.
Cause: The experts of all ranks stand one rank after another, each in as many rows as the graph has. After a replay a
rank looks for its own behind as many rows as the last decode graph had, although a prefill graph was replayed.
Change: A batch that a prefill graph was replayed for is looked up by the rows of that graph. Decode, eager prefill and
all-to-all backends are left as they are.
Remove when: Every release that has to be served looks it up by the graph that was replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS, ROUTED_EXPERTS
from sglang_bcg_fixes.anatomy.runners import EXECUTOR, PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, wrong

LOOK_UP = "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer._get_local_slice"
OFFSET = "sglang.srt.layers.dp_attention:get_dp_local_slice_cpu"
FORWARD = f"{EXECUTOR}.model_runner:ModelRunner.forward"
LOAD = f"{PREFILL}.load_batch"
ROWS = "bcg_fixes_replayed_rows"


def probe(source: Source) -> Finding:
    if not source.has_module(PREFILL_MODULE):
        return absent("prefill graphs of this release cannot be captured under DP attention")
    look_up, offset, forward = source.need(LOOK_UP), source.need(OFFSET), source.need(FORWARD)
    read = [look_up, offset, forward, source.need(LOAD).header]
    by_decode = forward.mentions("cuda_graph_batch=getattr(self.decode_cuda_graph_runner, 'bs', None)")
    if by_decode and offset.mentions("dp_rank * cuda_graph_batch") and OFFSET.partition(":")[2] in look_up.calls:
        return affected("experts are looked up by the rows of a decode graph, whichever graph was replayed", *read)
    return drifted("experts are looked up", *read)


def note_rows(original: Callable[..., Any], self: Any, forward_batch: Any, **kwargs: Any) -> Any:
    loaded = original(self, forward_batch, **kwargs)
    # later releases give another thing beside it
    static = loaded[0] if isinstance(loaded, tuple) else loaded
    setattr(forward_batch, ROWS, len(static.input_ids))
    return loaded


def look_up(
    original: Callable[..., Any], self: Any, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None
) -> Any:
    rows = getattr(forward_batch, ROWS, cuda_graph_batch)
    return original(self, forward_batch, can_run_graph, rows)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/30712",
        "https://github.com/sgl-project/sglang/issues/31116",
        "https://github.com/sgl-project/sglang/pull/31100",
    ),
    probe=probe,
    patches=(
        PatchPoint((LOAD,), How.AROUND, note_rows),
        PatchPoint((LOOK_UP,), How.AROUND, look_up),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(DP_ATTENTION, ROUTED_EXPERTS, PREFILL_GRAPHS),
)
