# SPDX-License-Identifier: Apache-2.0
"""DeepSeek and Kimi models do not start with --dcp-size above 1 and prefill graphs

Symptom: With --dcp-size above 1, a DeepSeek or Kimi model with prefill graphs does not start: "'NoneType' object has no
attribute 'dcp_local_prefix_kv_indices'" while they are captured. On 0.5.15 and 0.5.15.post1 with default flags, later
with an explicit --cuda-graph-backend-prefill.
Cause: In a prefill the layers gather the prefix of all ranks by indices that only the eager runner makes. The batch
that graphs are captured with has none. From 0.5.16 the default backend is turned off there, an explicit one is not.
Change: None: without these indices there is nothing to capture. This version only watches for it.
Remove when: Every release that has to be served turns these graphs off, or gives their batch the indices.
"""

from __future__ import annotations

from sglang_bcg_fixes.anatomy.launches import DECODE_CONTEXT, LATENT, PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, Source, absent, affected, ends, fixed

FORWARD_METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods"
PREPARE = f"{FORWARD_METHODS}.forward_mla:DeepseekMLAForwardMixin.forward_absorb_prepare"
INDICES = "forward_batch.attn_dcp_metadata.dcp_local_prefix_kv_indices"


def probe(source: Source) -> Finding:
    prepare = source.need(PREPARE)
    if not prepare.mentions(INDICES):
        return absent("a prefill gathers no prefix of other ranks, or not by such indices", prepare)
    if prepare.mentions("forward_batch.attn_dcp_metadata is not None"):
        return fixed("a batch without these indices is let through", prepare)
    return affected("layers take the indices of a batch that may have none", prepare)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/38943",),
    probe=probe,
    workarounds=PREFILL_GRAPHS_OFF,
    concerns=ends(LATENT, DECODE_CONTEXT, PREFILL_GRAPHS),
)
