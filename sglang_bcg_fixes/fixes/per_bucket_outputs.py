"""Every prefill graph keeps a hidden-state tensor of its own

Symptom: Breakable CUDA graphs cost more memory than they need: 0.73 GiB for hidden size 4096 with the default sizes up
to 8192 tokens, twice that for 8192. The KV cache is smaller by as much.
Cause: The output of each bucket's capture is kept for its replay, one tensor of bucket x hidden size for each of the 58
default buckets, although only one graph runs at a time.
Change: A fix would copy the output into one buffer of the largest bucket, inside the graph. This version only watches
for it.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import FEWER_PREFILL_GRAPHS
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed, unknown
from sglang_bcg_fixes.runners import OLD_PREFILL

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
        return affected("each graph keeps the hidden states that it ended with", old, captured)
    return unknown("the graphs keep their outputs in a way that no known release does", old, captured)


FIX = Fix(
    id="per_bucket_outputs",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "d3f5e503307d": "BreakableCudaGraphRunner._run_forward, 0.5.11",
        "099e02893b1d": "BreakableCudaGraphRunner._capture_all, 0.5.12 to 0.5.13.post1",
        "c9bf8cf00098": "BreakableCudaGraphRunner._run_forward, 0.5.12 to 0.5.12.post1",
        "54c00dd3c4de": "BreakableCudaGraphRunner._run_forward, 0.5.13 to 0.5.13.post1",
        "8c052e0a078d": "BreakableCudaGraphBackend.capture_one's self._shared_output_buffer, 0.5.14 to 0.5.15.post1",
        "2d06154ea2cb": "BreakableCudaGraphBackend.capture_one's self._shared_output_buffer, 0.5.16 to 0.5.20",
        "b0d080846abd": "BreakableCudaGraphBackend.capture_one's self._shared_output_buffer, 0.5.21 to 0.5.23",
    },
    mitigations=FEWER_PREFILL_GRAPHS,
)
