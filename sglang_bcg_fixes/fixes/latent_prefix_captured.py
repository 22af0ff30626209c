# SPDX-License-Identifier: Apache-2.0
"""MLA models answer wrongly behind a cached prefix (full prefill graphs, FlashAttention 3)

Symptom: With --cuda-graph-backend-prefill full, which SGLang calls experimental, models with latent attention (MLA) on
FlashAttention 3, its default on Hopper, answer a prompt wrongly, with HTTP 200, if a part of it is in the prefix cache
or was prefilled in an earlier chunk. Breakable prefill graphs are right.
Cause: In 0.5.16, and with --disable-chunked-prefix-cache, such a graph is captured without a prefix and replayed with
one, which it does not see; before, such a server does not start. From 0.5.17 on it is captured again for prefixes, but
for FlashAttention 3 with a table of the graph's own size. A replay writes the slots of a longer prefix past its end and
reads a part of the keys.
Change: A batch with a prefix runs eagerly; all others are replayed as before. From 0.5.17 on forms that take every
prefix are left alone: that of FlashAttention 4, and the absorbed one, which SGLang captures where it takes a chunk of
prefixes for too short (SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD), and with --enable-deterministic-inference.
Remove when: Every release that has to be served captures a form that takes every prefix.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.latent_attention import HANDLERS
from sglang_bcg_fixes.anatomy.launches import FA3, FULL_PREFILL_GRAPHS, LATENT
from sglang_bcg_fixes.anatomy.refusals import none_without_breaks, questions, refusing_in_full_graphs
from sglang_bcg_fixes.anatomy.runners import PREFILL
from sglang_bcg_fixes.anatomy.workarounds import BREAKABLE_PREFILL_GRAPHS
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, drifted, fixed, wrong

CAPTURE = f"{PREFILL}._prepare_chunked_prefix_capture"
CHOOSE = f"{HANDLERS}:_support_mha_one_shot"
# by which the expanded form in one step is chosen
TOTAL = "sum(forward_batch.seq_lens_cpu)"
# of a layer that chooses a form for each batch
DISPATCH = "dispatch_attn_forward_method"
# attribute on a runner that caches whether its model has such layers
CHOOSES = "bcg_fixes_chooses_latent_form"


def probe(source: Source) -> Finding:
    if none := none_without_breaks(source):
        return none
    choose, capture = source.need(CHOOSE), source.find(CAPTURE)
    asked = questions(source)
    if not choose.mentions(TOTAL):
        return drifted("the form for a prefix is chosen", choose, *asked)
    if capture is None and not asked[0].mentions("_has_unsupported_mha_prefix"):
        return absent("the capture gives the expanded form to the absorbed layer, and no server starts", choose, *asked)
    if capture is None:
        return affected("a graph without a prefix is replayed for batches with one", choose, *asked)
    if capture.mentions("forward_batch.seq_lens_cpu"):
        return fixed("the captured batch is as long as its prefix", choose, capture, *asked)
    return affected("the table of a captured prefix is as long as the graph", choose, capture, *asked)


def misses_a_prefix(runner: Any, prefix: int, _longest: int) -> bool:
    if not prefix:
        return False
    captured = getattr(runner, "_prefix_capture_batches", None)
    if captured:
        # set by the form that is wrong; the others read tables of a fixed size
        return any(batch.mha_one_shot for batch in captured.values())
    if CHOOSES not in vars(runner):
        modules = runner.model_runner.model.modules()
        setattr(runner, CHOOSES, any(hasattr(module, DISPATCH) for module in modules))
    chooses: bool = getattr(runner, CHOOSES)
    return chooses


FIX = Fix(
    probe=probe,
    patches=refusing_in_full_graphs(misses_a_prefix),
    workarounds=BREAKABLE_PREFILL_GRAPHS,
    verify=("deepseek_unbroken_prefix",),
    concerns=wrong(LATENT, FULL_PREFILL_GRAPHS, FA3),
)
