# SPDX-License-Identifier: Apache-2.0
"""MLA models die at the first replayed prefill on FlashAttention 3 (explicit graphs)

Symptom: DeepSeek, Kimi-Linear and other models with latent attention (MLA) stop at their first replayed prefill on
FlashAttention 3, with a shape mismatch in `q.view`. On TensorRT-LLM (Blackwell) absorbed queries are passed to the
kernel for expanded ones. Only where the breakable backend is chosen explicitly: it is off by default for these models.
Cause: 0.5.17 pins the absorbed form (MLA) under a breakable graph for every model, but still marks each replay's batch
as captured in the expanded form (MHA), unless the model is on a list that has one name. FlashAttention believes the
batch. TensorRT-LLM's backend plans for the absorbed form under a piecewise graph only.
Change: Where layers on FlashAttention 3 ask SGLang's handlers, which capture the absorbed form, a replay's batch says
so. Under a breakable graph TensorRT-LLM plans as it does under a piecewise one. Other backends do not ask the batch, or
choose the expanded form, and stay as they are. So does Sarvam's attention, which asks a table of its own and is always
captured in the expanded form.
Remove when: 0.5.17 no longer has to be served.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_bcg_fixes.anatomy.latent_attention import TENSORRT_PLAN, as_under_a_piecewise_graph
from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, FLASH_ATTENTION, LATENT, TRTLLM
from sglang_bcg_fixes.anatomy.runners import PREFILL, makes_breakable_graphs
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, ends, fixed

HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler:_handle_attention_backend"
RESTORE = f"{PREFILL}._restore_mha_capture_state"
LOAD = f"{PREFILL}.load_batch"
# attributes of an attention layer: its expanded form, and what asks the handlers
EXPANDED, ASKS = "attn_mha", "dispatch_attn_forward_method"


def probe(source: Source) -> Finding:
    restore = source.find(RESTORE)
    if restore is None:
        return absent("the runner prepares no replay for the expanded form")
    handler = source.need(HANDLER)
    if "is_in_breakable_cuda_graph" not in handler.calls:
        return absent("the expanded form is captured, too", handler, restore)
    load = source.need(LOAD)
    if load.mentions("self.has_mha_companion_layers and (not self.mla_pinned_under_bcg)"):
        wrong = "the absorbed form is captured, and replays are prepared for the other one"
        return affected(wrong, handler, load, source.need(TENSORRT_PLAN))
    if load.mentions("self.has_mha_companion_layers and (not is_cuda())"):
        return fixed("on CUDA replays are not prepared for the expanded form", handler, load)
    return drifted("replays are prepared", handler, load)


def in_the_absorbed_form(batch: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    on_flash_attention = self.model_runner.prefill_attention_backend_str == "fa3"
    if (
        makes_breakable_graphs(self)
        and self.has_mha_companion_layers
        and on_flash_attention
        and asks_the_handlers(self.layer_model)
    ):
        batch.set_attn_attend_prefix_cache(None)
    return batch


@functools.cache
def asks_the_handlers(layers: Any) -> bool:
    """Tell whether the latent attention of these layers asks SGLang's handlers for its form."""
    return all(hasattr(part, ASKS) for part in layers.modules() if hasattr(part, EXPANDED))


FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((LOAD,), How.AFTER, in_the_absorbed_form),
        PatchPoint(
            (TENSORRT_PLAN,),
            How.AROUND,
            as_under_a_piecewise_graph,
        ),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("kimi_linear_prefill_graph",),
    concerns=ends(LATENT, ASKED_FOR, FLASH_ATTENTION | TRTLLM),
)
