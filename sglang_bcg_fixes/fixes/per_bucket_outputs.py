# SPDX-License-Identifier: Apache-2.0
"""A smaller KV cache: prefill graphs take more GPU memory than they need

Symptom: Breakable CUDA graphs use more memory than they need: 0.73 GiB for hidden size 4096 with the default sizes up
to 8192 tokens, twice that for 8192. The KV cache shrinks by as much.
Cause: Each bucket's capture keeps its output for its replay, one tensor of bucket x hidden size for each of the 58
default buckets, although only one graph runs at a time.
Change: A fix would copy the output into one buffer of the largest bucket, inside the graph. This version only watches
for it.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL
from sglang_bcg_fixes.anatomy.workarounds import FEWER_PREFILL_GRAPHS
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, drifted, fixed, slower

BACKEND = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend:BreakableCudaGraphBackend"


def probe(source: Source) -> Finding:
    old = source.find(f"{OLD_PREFILL}._capture_all")
    if old is None:
        shared = source.need(f"{BACKEND}.capture_one").need_assignment_to("self._shared_output_buffer")
        return fixed("all graphs write to one output buffer", shared)
    captured = source.need(f"{OLD_PREFILL}._run_forward")
    if "self.layer_model.forward" not in captured.calls:
        return absent("the graphs end with the logits of one request, and keep no hidden states", captured)
    kept = old.need_assignment_to("self.output_buffers[num_tokens]")
    if kept.text.endswith("= output"):
        return affected("each graph keeps the hidden states it ended with", old, captured)
    return drifted("the graphs keep their outputs", old, captured)


FIX = Fix(
    probe=probe,
    workarounds=FEWER_PREFILL_GRAPHS,
    concerns=slower(PREFILL_GRAPHS),
)
