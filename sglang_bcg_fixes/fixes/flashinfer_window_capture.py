# SPDX-License-Identifier: Apache-2.0
"""Sliding-window models do not start with full prefill graphs on FlashInfer

Symptom: With --cuda-graph-backend-prefill full and --attention-backend flashinfer, a model with a sliding-window cache
does not start: "'FlashInferAttnBackend' object has no attribute 'cuda_graph_swa_out_cache_loc'" while its prefill
graphs are captured. From 0.5.15 on, never with default flags. Breakable graphs are not concerned: there attention is a
break.
Cause: The slots of the window are handed to a graph in a buffer that only the set-up of decode graphs makes, and
prefill graphs are captured before that.
Change: None: a buffer made earlier would be replaced under the graphs that have captured it, and be too small for them.
This version only watches for it.
Remove when: Every release that has to be served gives these graphs a buffer of their own.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import BACKENDS, FLASHINFER, FULL_PREFILL_GRAPHS, WINDOW, named
from sglang_bcg_fixes.anatomy.workarounds import BREAKABLE_PREFILL_GRAPHS
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, ends, fixed

BACKEND = "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend"
PREPARE = f"{BACKEND}.init_forward_metadata_out_graph"
# before 0.5.13
OLD_PREPARE = f"{BACKEND}.init_forward_metadata_capture_cuda_graph"
MAKE = f"{BACKEND}._create_full_cg_prefill_wrappers"
# filled for every kind of batch, in capture too
FILL = "self.cuda_graph_swa_out_cache_loc[n:].zero_()"


def probe(source: Source) -> Finding:
    prepare = source.need(PREPARE, OLD_PREPARE)
    if not prepare.mentions("forward_mode.is_extend()"):
        return absent("FlashInfer has no full prefill graphs", prepare)
    make = source.need(MAKE)
    if prepare.mentions(FILL) and not make.mentions("swa_out_cache_loc"):
        return affected("a prefill is captured with a buffer that nobody has made", prepare, make)
    return fixed("a prefill is captured with a buffer of its own", prepare, make)


def attends_with_it(launch: Launch) -> bool | None:
    """SGLang gives Llama 4 another backend; a flag may still name this one for a part of its attention."""
    is_named = any("flashinfer" in (launch.word(name) or "") for name in BACKENDS)
    return FLASHINFER.holds(launch) if is_named or not named("Llama4*").holds(launch) else False


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/38747",),
    probe=probe,
    workarounds=BREAKABLE_PREFILL_GRAPHS,
    concerns=ends(FULL_PREFILL_GRAPHS, Condition(FLASHINFER.says, attends_with_it), WINDOW),
)
