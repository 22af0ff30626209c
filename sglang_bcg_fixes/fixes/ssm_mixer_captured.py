# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 answers wrongly with breakable prefill graphs, the default from 0.5.15

Symptom: Falcon-H1 answers wrongly with HTTP 200, logprobs are off by up to 1 or NaN, nothing is in the log. From 0.5.15
no flag is needed: breakable graphs are the default there.
Cause: The decoder layer has an attribute `attn`, so it passes the test for ordinary attention, and the call of its
mixer next to it has no graph break. Capture freezes the dummy batch's state slots, metadata and the host's flag for
whether a state exists.
Change: Wherever a layer reaches Mamba2AttnBackend.forward while a prefill graph is captured, the mixer runs as an eager
break, made by the installed release's own eager_on_graph: on the real tokens, with the backend and the batch of the
replay, into an output that was allocated in the graph and whose padded tail is zeroed. A mixer that is already inside a
break (NemotronH) or that the kernel mamba2_extend takes, decode graphs and eager prefill are left as they were.
Remove when: Every release that has to be served breaks the graph at this mixer, or refuses the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.forward_batch import (
    CONTEXT,
    is_captured_into_a_prefill_graph,
    live_backend,
    prefill_batch,
)
from sglang_bcg_fixes.anatomy.launches import FALCON_H1, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.mamba2_extend import declaration as mamba2_extend
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

MODEL = "sglang.srt.models.falcon_h1"
BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
MIXER = "Mamba2AttnBackend.forward"


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("this release has no Falcon-H1")
    layer = source.need(f"{MODEL}:FalconH1HybridAttentionDecoderLayer.forward")
    mixer = source.need(f"{BACKEND}:{MIXER}")
    for name in sorted(layer.calls):
        stem = name.rpartition(".")[2]
        if source.is_graph_break(MODEL, stem):
            return fixed(f"the layer calls {stem}, which is a graph break", layer, source.need(f"{MODEL}:{stem}"))
    if source.is_graph_break(BACKEND, MIXER):
        return fixed(f"{MIXER} is a graph break", layer, mixer)
    if "attn_backend.linear_attn_backend.forward" in layer.calls:
        decorator = source.need(*(f"{module}:eager_on_graph" for module in graph_break.DECORATOR_MODULES))
        reason = "the layer calls its Mamba2 mixer with no graph break between"
        return affected(reason, layer, mixer, decorator, source.need(*CONTEXT))
    return drifted("the layer reaches its mixer", layer, mixer)


def break_round_the_mixer(
    original: Callable[..., Any],
    self: Any,
    mixer: Module,
    hidden_states: Tensor,
    output: Tensor | None,
    layer_id: int,
    *further: Any,
    **rest: Any,
) -> Any:
    rest |= dict(zip(names_after("layer_id", original), further, strict=False)) if further else {}
    if not is_captured_into_a_prefill_graph() or has_a_kernel(mixer, hidden_states, layer_id):
        return original(self, mixer, hidden_states, output, layer_id, **rest)
    if output is None:
        output = hidden_states.new_empty(hidden_states.shape)
    as_break(original)(mixer, hidden_states, output, layer_id, **rest)
    return output


@functools.cache
def names_after(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    names = [*inspect.signature(function).parameters]
    return tuple(names[names.index(name) + 1 :])


def has_a_kernel(mixer: Module, hidden_states: Tensor, layer_id: int) -> bool:
    """Tell whether a kernel of this package, which is around the original, captures the mixer as it should be."""
    if not active.is_used(mamba2_extend.KERNEL.op):
        return False
    from sglang_bcg_fixes.kernels.mamba2_extend import adapter

    return adapter.is_taken(mixer, hidden_states, layer_id)


@functools.cache
def as_break(original: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def run_on_real_tokens(mixer: Module, hidden_states: Tensor, output: Tensor, layer_id: int, **rest: Any) -> None:
        batch = prefill_batch()
        backend = live_backend(batch).linear_attn_backend
        metadata = backend.forward_metadata
        real = metadata.num_prefill_tokens + metadata.num_decodes
        if "forward_batch" in rest:
            rest["forward_batch"] = batch
        original(backend, mixer, hidden_states[:real], output[:real], layer_id, **rest)
        output[real:].zero_()

    broken: Callable[..., None] = graph_break.decorate(run_on_real_tokens, None)
    return broken


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((f"{BACKEND}:{MIXER}",), How.AROUND, break_round_the_mixer),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("falcon_h1_prefill_graph", "falcon_h1_checkpoints"),
    concerns=wrong(FALCON_H1, PREFILL_GRAPHS),
)
