"""Prefill graphs serve batches of one request only

Symptom: With breakable CUDA graphs on, a prefill batch of two or more requests never replays a graph; it is right, and
as slow as without graphs. `cuda graph: True` never appears in the log next to more than one new sequence.
Cause: The whole model is captured with one request, its logits too, so a replay has one row of logits to give, and
can_run refuses a larger batch.
Change: A fix would capture the layers only and compute the logits of the real batch outside the graph, as 0.5.12 does.
This version only watches for it.
Remove when: No release before 0.5.12 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed, unknown

OLD_RUNNER = "sglang.srt.model_executor.breakable_cuda_graph_runner:BreakableCudaGraphRunner"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner"


def probe(source: Source) -> Finding:
    captured = source.need(f"{OLD_RUNNER}._run_forward", f"{RUNNER}._run_forward")
    if "self.layer_model.forward" in captured.calls:
        return fixed("the layers are captured without the logits", captured)
    admission = source.need(f"{OLD_RUNNER}.can_run", f"{RUNNER}.can_run_graph")
    if "self.model_runner.model.forward" in captured.calls and admission.mentions("forward_batch.batch_size > 1"):
        return affected("the whole model is captured with one request, and can_run refuses more", captured, admission)
    return unknown("the prefill runner captures something that no known release does", captured, admission)


FIX = Fix(
    id="single_request_capture",
    doc=__doc__,
    upstream=("https://github.com/sgl-project/sglang/pull/24662",),
    probe=probe,
    known={
        "d3f5e503307d": "BreakableCudaGraphRunner._run_forward, 0.5.11",
        "7acbf663b8d2": "BreakableCudaGraphRunner.can_run, 0.5.11",
        "c9bf8cf00098": "BreakableCudaGraphRunner._run_forward, 0.5.12 to 0.5.12.post1",
        "54c00dd3c4de": "BreakableCudaGraphRunner._run_forward, 0.5.13 to 0.5.13.post1",
        "dfcad89732ce": "PrefillCudaGraphRunner._run_forward, 0.5.14 to 0.5.15.post1",
        "416ac7d101d4": "PrefillCudaGraphRunner._run_forward, 0.5.16 to 0.5.18",
        "9b08284819f1": "PrefillCudaGraphRunner._run_forward, 0.5.19 to 0.5.21",
        "2add49383b22": "PrefillCudaGraphRunner._run_forward, 0.5.22 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
