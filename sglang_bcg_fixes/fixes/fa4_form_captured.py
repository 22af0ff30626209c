# SPDX-License-Identifier: Apache-2.0
"""MLA models die at the first replayed prefill with fa4 on GPUs before Blackwell

Symptom: With `--prefill-attention-backend fa4` on a GPU before Blackwell, or on an RTX 50 or RTX PRO 6000, models with
latent attention (MLA) end at their first replayed prefill, with an `AssertionError` about the shape of the keys.
Cause: FlashAttention 4 has no absorbed form there, so its handler answers expanded without asking if a breakable graph
is captured. From 0.5.18 on replays on CUDA are prepared for the absorbed form, which every other handler captures.
Change: No breakable prefill graph is captured for a model with such layers, and prefill runs eagerly. One warning says
so.
Remove when: Every release that has to be served makes no prefill graph there, or replays the expanded form.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglang_bcg_fixes.anatomy.latent_attention import HANDLERS, judge_chooser
from sglang_bcg_fixes.anatomy.launches import FA4, LATENT, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.refusals import refusing
from sglang_bcg_fixes.anatomy.runners import PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, ends

BACKEND = "fa4"
CHOOSE = f"{HANDLERS}:handle_attention_fa4"
# asks a layer for its form, by the name of the backend
DISPATCH = "dispatch_attn_forward_method"
MODEL = "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA"


def probe(source: Source) -> Finding:
    if not source.has_module(HANDLERS):
        return absent("no handler chooses the form of latent attention")
    expanded = "return AttnForwardMethod.MHA_CHUNKED_KV"
    return judge_chooser(source, source.need(CHOOSE), expanded, f"{MODEL}.{DISPATCH}", f"{PREFILL}.capture")


def why_refused(runner: Any) -> str:
    model = runner.model_runner.model
    if not any(hasattr(module, DISPATCH) for module in model.modules()):
        return ""
    # the runner's own question: where the answer is no, replays are prepared for the expanded form
    if not importlib.import_module(PREFILL_MODULE).is_cuda() or prefills_with(runner) != BACKEND or has_absorbed_form():
        return ""
    return "fa4 has no absorbed form of latent attention on this GPU, and the first replay would end the server"


def prefills_with(runner: Any) -> str | None:
    """Return the backend's name as a layer finds it."""
    of_server, _ = importlib.import_module(MODEL.partition(":")[0]).attention_backends()
    name: str | None = runner.model_runner.attn_backend.prefill_attention_backend_str or of_server
    return name


def has_absorbed_form() -> bool:
    """Ask what the handler asks."""
    handlers: Any = importlib.import_module(HANDLERS)
    if hasattr(handlers, "is_sm100_or_sm110_supported"):
        return bool(handlers.is_sm100_or_sm110_supported())
    return bool(handlers.get_platform().is_sm100_or_sm110)


unless_refused, never_if_refused = refusing("fa4_form_captured", why_refused)

FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((f"{PREFILL}.capture",), How.AROUND, unless_refused),
        # the vote of a data parallel rank asks this, too
        PatchPoint((f"{PREFILL}.can_replay_locally",), How.AROUND, never_if_refused),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(LATENT, PREFILL_GRAPHS, FA4),
)
