# SPDX-License-Identifier: Apache-2.0
"""Sarvam's MLA models die at the first replayed prefill on FlashAttention 3

Symptom: Sarvam's models with latent attention (MLA) stop at their first replayed prefill on FlashAttention 3, with
"shape ... is invalid for input of size" or, from 0.5.22 on, an error of `einsum`.
Cause: These models choose between the absorbed (MLA) and the expanded (MHA) form with a function of their own. For a
prefill on FlashAttention 3 it answers expanded without asking if a breakable graph is captured. From 0.5.18 on replays
on CUDA are prepared for the absorbed form, which SGLang's shared handlers capture, so FlashAttention takes the expanded
queries for absorbed ones.
Change: Under a breakable graph on CUDA the function answers absorbed where it would answer expanded. Eager prefill
stays as it is and computes the same with other kernels, so replays give the same tokens with differently rounded
logprobs. Off CUDA replays are prepared for the expanded form, and it is captured as before.
Remove when: Every release that has to be served asks for a breakable graph before it chooses the expanded form.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglang_bcg_fixes.anatomy.latent_attention import judge_chooser
from sglang_bcg_fixes.anatomy.launches import FA3, LATENT, PREFILL_GRAPHS, named
from sglang_bcg_fixes.anatomy.runners import PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, ends

MODEL = "sglang.srt.models.sarvam_moe"
CHOOSE = f"{MODEL}:get_attn_forward_method"


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("no model chooses its form of latent attention by itself")
    expanded = "return AttnForwardMethod.MHA_PREFILL"
    return judge_chooser(source, source.need(CHOOSE), expanded, f"{MODEL}:AttnForwardMethod")


def absorbed_under_a_breakable_graph(method: Any, forward_batch: Any) -> Any:
    forms = type(method)
    if method != forms.MHA_PREFILL or not graph_break.load("context").is_in_breakable_cuda_graph():
        return method
    # the runner's own question: where the answer is no, replays are prepared for the expanded form
    if not importlib.import_module(PREFILL_MODULE).is_cuda():
        return method
    return forms.MLA_SEPARATE_ROPE


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((CHOOSE,), How.AFTER, absorbed_under_a_breakable_graph),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(named("Sarvam*"), LATENT, PREFILL_GRAPHS, FA3),
)
