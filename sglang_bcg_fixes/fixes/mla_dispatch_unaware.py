# SPDX-License-Identifier: Apache-2.0
"""MLA models (DeepSeek, Kimi-Linear) do not start with breakable prefill graphs

Symptom: DeepSeek, Kimi-Linear and other models with latent attention (MLA) stop at start-up, while prefill graphs are
captured, with a shape mismatch in `q.view`. From 0.5.14 only where the breakable backend is chosen explicitly: it is
off by default for these models.
Cause: The handlers that choose between the absorbed (MLA) and the expanded (MHA) form check for piecewise graphs only
and choose MHA, and the attention break then looks its layer up in a list that holds the MLA layer. FlashInfer and
TensorRT-LLM plan for MHA, too.
Change: Under a breakable graph the handlers choose, and the two backends plan, as they do under a piecewise one: MLA.
Up to 0.5.13.post1 the runner's warm-up counts as under a breakable graph, because it looks the layers up in the same
list. TensorRT-LLM forgets the plan of a captured prefill before it captures a verification of drafts, as it does before
an eager one: it would capture a kernel that is planned for that prefill. The FlashAttention 4 and AITER handlers choose
MHA under every graph and stay as they are. Eager prefill computes the same with other kernels, so replays give the same
tokens with differently rounded logprobs.
Remove when: No release before 0.5.16 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.latent_attention import CHOOSE, TENSORRT_PLAN, as_under_a_piecewise_graph
from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, LATENT
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, OLD_PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, ends, fixed

ATTENTION = "sglang.srt.layers.radix_attention"
PLAN = (
    "sglang.srt.layers.attention.flashinfer_mla_backend:FlashInferMLAAttnBackend.init_forward_metadata",
    TENSORRT_PLAN,
)
WARM_UP = f"{OLD_PREFILL}._warmup"
TENSORRT = TENSORRT_PLAN.rpartition(".")[0]
# of a decode graph, in newer and older releases
GRAPH_PLAN, OLD_GRAPH_PLAN = (
    f"{TENSORRT}.init_forward_metadata_{name}" for name in ("out_graph", "capture_cuda_graph")
)
OF_DRAFTS = ("TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2")


def probe(source: Source) -> Finding:
    handlers = tuple(source.need(where) for where in CHOOSE)
    if all("is_in_breakable_cuda_graph" in handler.calls for handler in handlers):
        return fixed("the handlers choose the absorbed form under a breakable graph", *handlers)
    operation = source.need(f"{ATTENTION}:unified_attention_with_output")
    if operation.mentions("context.mha_companion_layers[layer_id]"):
        return fixed("the attention break replaces the MLA layer with the MHA layer", *handlers, operation)
    plan_of_graphs = source.need(GRAPH_PLAN, OLD_GRAPH_PLAN)
    chosen = " (only where the breakable backend is chosen explicitly)"
    patched_too = tuple(source.need(where) for where in (*PLAN, *((WARM_UP,) if warms_up_outside(source) else ())))
    return affected(
        f"the handlers choose MHA under a breakable graph, and the break looks up the MLA layer"
        f"{chosen if source.has_option('--cuda-graph-backend-prefill') else ''}",
        *handlers,
        operation,
        *patched_too,
        plan_of_graphs,
    )


def warms_up_outside(source: Source) -> bool:
    return source.has_module(OLD_PREFILL_MODULE)


def plans_outside(source: Source) -> bool:
    return source.find(GRAPH_PLAN) is not None


def plans_by_mode(source: Source) -> bool:
    return source.find(OLD_GRAPH_PLAN) is not None


def under_a_breakable_graph(original: Callable[[Any], None], self: Any) -> None:
    with graph_break.load("context").enable_breakable_cuda_graph():
        original(self)


def forget_the_prefill(self: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    forget_it_for(self, forward_batch.forward_mode)


def forget_the_prefill_by_its_mode(
    self: Any,
    bs: int,
    num_tokens: int,
    req_pool_indices: Any,
    seq_lens: Any,
    encoder_lens: Any,
    forward_mode: Any,
    *_: Any,
    **__: Any,
) -> None:
    forget_it_for(self, forward_mode)


def forget_it_for(backend: Any, mode: Any) -> None:
    if mode.name in OF_DRAFTS:
        backend.forward_prefill_metadata = None


FIX = Fix(
    probe=probe,
    patches=(
        *(
            PatchPoint((where,), How.AROUND, as_under_a_piecewise_graph, aliases=aliases)
            for where, aliases in CHOOSE.items()
        ),
        *(PatchPoint((where,), How.AROUND, as_under_a_piecewise_graph) for where in PLAN),
        PatchPoint((WARM_UP,), How.AROUND, under_a_breakable_graph, needed=warms_up_outside),
        PatchPoint((GRAPH_PLAN,), How.BEFORE, forget_the_prefill, needed=plans_outside),
        PatchPoint((OLD_GRAPH_PLAN,), How.BEFORE, forget_the_prefill_by_its_mode, needed=plans_by_mode),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("kimi_linear_prefill_graph",),
    concerns=ends(LATENT, ASKED_FOR),
)
