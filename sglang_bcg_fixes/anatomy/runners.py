# SPDX-License-Identifier: Apache-2.0
"""Locations of SGLang's CUDA graph runners, by release; a release has at most one of a kind."""

from __future__ import annotations

from typing import Any

EXECUTOR, SPECULATIVE = "sglang.srt.model_executor", "sglang.srt.speculative"
OLD_PREFILL_MODULE = f"{EXECUTOR}.breakable_cuda_graph_runner"
PREFILL_MODULE = f"{EXECUTOR}.runner.prefill_cuda_graph_runner"
OLD_PREFILL = f"{OLD_PREFILL_MODULE}:BreakableCudaGraphRunner"
PREFILL = f"{PREFILL_MODULE}:PrefillCudaGraphRunner"
OLD_DECODE = f"{EXECUTOR}.cuda_graph_runner:CudaGraphRunner"
DECODE_MODULE = f"{EXECUTOR}.runner.decode_cuda_graph_runner"
DECODE = f"{DECODE_MODULE}:DecodeCudaGraphRunner"
EAGER = f"{EXECUTOR}.runner.eager_runner:EagerRunner"
DRAFT = f"{SPECULATIVE}.eagle_draft_cuda_graph_runner:EAGLEDraftCudaGraphRunner"
DRAFT_EXTEND = f"{SPECULATIVE}.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner"
# of later releases: what decides if a prefill runner is made, and makes it
SETUP_MODULE = f"{EXECUTOR}.model_runner_components.cuda_graph_setup"
CAPTURE_PREFILL = f"{SETUP_MODULE}:capture_prefill_graph"
# of releases whose prefill graphs may have breaks or none: what chooses between them
RESOLVE = f"{EXECUTOR}.runner_backend.utils:resolve_prefill_backend"
# what a data parallel rank votes by, and later releases also refuse by
MAY_REPLAY_BY_RANK = f"{PREFILL}.can_replay_locally"
# called before each prefill replay; may refuse it
MAY_REPLAY = (f"{OLD_PREFILL}.can_run", f"{PREFILL}.can_run_graph")
# older location first
BY_PHASE = {
    "prefill": (OLD_PREFILL, PREFILL),
    "decode": (OLD_DECODE, DECODE),
    "draft": (DRAFT,),
    "draft_extend": (DRAFT_EXTEND,),
}


def makes_breakable_graphs(runner: Any) -> bool:
    """Check this prefill runner's backend: later releases also have kinds of graphs without breaks."""
    backend = getattr(runner, "backend", None)
    return backend is None or type(backend).__name__ == "BreakableCudaGraphBackend"


def makes_full_graphs(runner: Any) -> bool:
    """Check this prefill runner's backend: one graph without breaks for the whole prefill."""
    return type(getattr(runner, "backend", None)).__name__ == "FullCudaGraphBackend"
