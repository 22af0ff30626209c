# SPDX-License-Identifier: Apache-2.0
"""GLM-5.3-Flash dies in prefill with DP attention and breakable graphs

Symptom: GLM-5.3-Flash with --enable-dp-attention and breakable prefill graphs ends with "Pooled-indexer prefill
returned an unexpected top-k shape", as soon as one rank's prompts are shorter than another's.
Cause: With data parallel attention each rank's batch is padded to the length of the longest. The indexer, which runs
between the segments of the graph, chooses for the rank's real tokens only, and its choice is taken for wrong because it
has fewer rows than the padded batch.
Change: The rows of padding are filled up with -1, which stands for nothing chosen, as rows of the graph's own padding
are. A choice that has fewer rows than real tokens is still refused.
Remove when: No release before 0.5.21 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import DP_ATTENTION, PREFILL_GRAPHS, SPARSE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, ends, fixed

MODULE = "sglang.srt.layers.attention.dsa.kpool_prefill_cuda_graph"
CHOOSE = f"{MODULE}:_kpool_indexer_prefill_with_output"
BREAK = f"{MODULE}:bcg_kpool_indexer_prefill_with_output"


def probe(source: Source) -> Finding:
    if not source.has_module(MODULE):
        return absent("no pooled indexer runs between segments of a prefill graph")
    choose = source.need(CHOOSE)
    if choose.mentions("num_logical <= result.shape[0] <= n"):
        return fixed("a choice for the real tokens is taken", choose)
    if choose.mentions("result.shape != (n, output.shape[1])"):
        return affected("a choice must have a row for each padded token", choose, source.need(BREAK))
    return drifted("a choice is checked", choose)


def run_and_pad(
    original: Callable[..., None], indexer: Any, x: Any, q_lora: Any, positions: Any, output: Any, layer_id: int
) -> None:
    choose = indexer._forward_cuda_impl

    def choose_for_padded(**named: Any) -> Any:
        chosen = choose(**named)
        return chosen if chosen is None else padded(chosen, named["forward_batch"])

    # the method of its class shows again afterwards
    vars(indexer)["_forward_cuda_impl"] = choose_for_padded
    try:
        original(indexer, x, q_lora, positions, output, layer_id)
    finally:
        del vars(indexer)["_forward_cuda_impl"]


def padded(chosen: Any, batch: Any) -> Any:
    """The choice with a row for each token of the padded batch; as it is where rows of real tokens are missing."""
    real, rows = sum(batch.extend_seq_lens_cpu), batch.extend_num_tokens
    if not real <= len(chosen) <= rows:
        return chosen
    filled = chosen.new_full((rows, *chosen.shape[1:]), -1)
    filled[:real] = chosen[:real]
    return filled


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/40629",),
    probe=probe,
    patches=(PatchPoint((BREAK,), How.GRAPH_BREAK, run_and_pad),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("llama_prefix_cache",),
    concerns=ends(SPARSE, DP_ATTENTION, PREFILL_GRAPHS),
)
