# SPDX-License-Identifier: Apache-2.0
"""Dots3 dies at its first replayed prefill, or answers wrongly (explicit breakable graphs)

Symptom: With breakable prefill graphs chosen explicitly, Dots3 ends at its first replayed prefill with "shape ... is
invalid for input of size" or an error of `einsum`, or with an illegal memory access. With an indexer, and while freed
memory is still as it was, it answers wrongly instead. By default it has no such graphs.
Cause: Its sliding layers attend by a method of their backend, beside the attention layer that breaks the graph: the
kernel is captured with the tables of the dummy batch, which are freed. Its full layers choose the expanded form of
latent attention without asking if a graph is captured, and replays on CUDA are prepared for the absorbed form.
Change: No breakable prefill graph is captured for a model with such layers, and prefill runs eagerly. One warning says
so.
Remove when: Every release that has to be served breaks the graph at each of these layers.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import ASKED_FOR, named
from sglang_bcg_fixes.anatomy.refusals import refusing
from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, wrong

MODEL = "sglang.srt.models.dots3_common.modeling"
ATTENDS = "forward_swa_mha_core"
ATTENTION = f"{MODEL}:Dots3AttentionMLA"
KERNEL = "backend.forward_swa_mla_expanded"


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("this release has no Dots3")
    attends = source.need(f"{ATTENTION}.{ATTENDS}")
    read = [attends, source.need(f"{ATTENTION}.dispatch_attn_forward_method"), source.need(f"{PREFILL}.capture")]
    if KERNEL not in attends.calls:
        return drifted("sliding layers attend", *read)
    return affected("sliding layers attend by a method of their backend, without a break", *read)


def why_refused(runner: Any) -> str:
    if any(hasattr(module, ATTENDS) for module in runner.model_runner.model.modules()):
        return "its sliding layers attend without a break of the graph, and the first replay would end the server"
    return ""


unless_refused, never_if_refused = refusing("dots3_attention_captured", why_refused)

FIX = Fix(
    probe=probe,
    patches=(
        PatchPoint((f"{PREFILL}.capture",), How.AROUND, unless_refused),
        # the vote of a data parallel rank asks this, too
        PatchPoint((f"{PREFILL}.can_replay_locally",), How.AROUND, never_if_refused),
    ),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=wrong(named("Dots3*"), ASKED_FOR),
)
