# SPDX-License-Identifier: Apache-2.0
"""Hybrid models do not start with full prefill graphs

Symptom: With --cuda-graph-backend-prefill full, which SGLang calls experimental, a hybrid model (Qwen3-Next, Qwen3.5,
NemotronH, Falcon-H1, Kimi-Linear and others) does not start: "IndexError: list index out of range" while its prefill
graphs are captured. Breakable graphs are not concerned.
Cause: A prefill is prepared for the capture as a decode step is, from lists that only the set-up of decode graphs
fills, and prefill graphs are captured before that. With the lists filled it would end in "Invalid forward mode".
Change: None: a graph without breaks has nothing that prepares linear layers for a prefill. This version only watches
for it.
Remove when: Every release that has to be served captures these models, or refuses such graphs to them.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import FULL_PREFILL_GRAPHS, HYBRID, INKLING
from sglang_bcg_fixes.anatomy.refusals import none_without_breaks
from sglang_bcg_fixes.anatomy.workarounds import BREAKABLE_PREFILL_GRAPHS
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import Finding, Fix, Source, affected, drifted, ends, fixed

BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"
PREPARE, REPLAY = f"{BACKEND}.init_forward_metadata_out_graph", f"{BACKEND}._replay_metadata"


def probe(source: Source) -> Finding:
    if none := none_without_breaks(source):
        return none
    prepare, replay = source.need(PREPARE), source.need(REPLAY)
    if "self._replay_metadata" not in prepare.calls:
        return drifted("linear layers are prepared", prepare, replay)
    if prepare.mentions("is_extend("):
        return fixed("a prefill is prepared in its own way", prepare, replay)
    return affected("a prefill is prepared as a decode step is", prepare, replay)


def has_linear_layers(launch: Launch) -> bool | None:
    """Inkling has a backend of its own, and such graphs by default."""
    return False if INKLING.holds(launch) else HYBRID.holds(launch)


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/35437",
        "https://github.com/sgl-project/sglang/pull/36077",
    ),
    probe=probe,
    workarounds=BREAKABLE_PREFILL_GRAPHS,
    concerns=ends(FULL_PREFILL_GRAPHS, Condition(HYBRID.says, has_linear_layers)),
)
