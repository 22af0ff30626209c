# SPDX-License-Identifier: Apache-2.0
"""The servers that have prefill graphs by default: those that gained on a GPU, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_bcg_fixes.anatomy.launches import named
from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend

# bytes of a GPU: for the graphs, and for what a start takes after them
LEAST_FREE = 4 << 30
# which gained on a GPU with all mixers inside the graph, and the largest size that `auto` captures: above it, padding
# may take more than the graph gains
MEASURED = {"GraniteMoeHybridForCausalLM": 4096}
LEFT_IF_MEASURED = (
    *("--enable-memory-saver", "--forward-hooks", "--quantization", "--enable-lora", "--lora-paths"),
    *("--cuda-graph-prefill-max-context", "--speculative-algorithm"),
)
# of a layer, and of the configuration; those that were measured have none
EXPERTS_OF_GRANITE, COUNT_OF_EXPERTS = "block_sparse_moe", "num_local_experts"


def is_measured(launch: Launch) -> bool | None:
    is_other = COUNT_OF_EXPERTS in launch.keys or launch.given(*LEFT_IF_MEASURED)
    several = launch.number("--tp-size", "--tensor-parallel-size", "--tp") or 1
    return False if is_other or several > 1 else named(*MEASURED).holds(launch)


def why_unmeasured(model_runner: Any) -> Iterator[str]:
    """List what no GPU has measured, or what SGLang itself serves without graphs only."""
    arguments, settings = model_runner.server_args, prefill_settings()
    has_experts = any(getattr(layer, EXPERTS_OF_GRANITE, None) is not None for layer in model_runner.model.model.layers)
    reasons = {
        "experts": has_experts,
        "tensor parallelism": int(arguments.tp_size) > 1,
        "quantization": bool(getattr(model_runner.model_config, "quantization", None)),
        "a memory saver": bool(arguments.enable_memory_saver),
        "hooks of layers": bool(getattr(arguments, "forward_hooks", None)),
        "graphs of a largest context": settings.max_context_size is not None,
        "no small size to capture": not sizes_to_capture(model_runner.model, settings),
    }
    yield from (f"{what}, which nobody has measured" for what, holds in reasons.items() if holds)


def why_no_room(model_runner: Any) -> Iterator[str]:
    """Say that the graphs may not fit: SGLang starts without them, and a capture that runs out of memory ends it."""
    import torch

    if model_runner.device == "cuda" and torch.cuda.mem_get_info()[0] < LEAST_FREE:
        yield f"less than {LEAST_FREE >> 30} GiB of GPU memory are free"


def prefill_settings() -> Any:
    """Return SGLang's settings of prefill graphs, in a release that was measured."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config.prefill


def sizes_to_capture(model: Any, settings: Any) -> list[int]:
    """Leave out those whose padding may take more than their graph gains."""
    return [size for size in settings.bs or () if size <= MEASURED[type(model).__name__]]


def why_not_inside(model_runner: Any, mixers: Mapping[int, Any]) -> Iterator[str]:
    """Say why a mixer would break the graph: with breaks some prompts were slower than without graphs."""
    op = mamba2_extend.KERNEL.op
    if not active.is_used(op):
        yield f"{op} does not run in this process"
        return
    from sglang_bcg_fixes.kernels.mamba2_extend import adapter

    reason = adapter.OPERATION.why_not_all(model_runner, mixers)
    if reason:
        yield f"{op}: {reason}"
