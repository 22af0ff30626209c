# SPDX-License-Identifier: Apache-2.0
"""No harm seen: padding in decode graphs points at former requests

Symptom: None seen by itself: with ordinary and latent attention the padded rows only read what they should not, and
their output is discarded. Anything that writes through these indices would write into another request's rows.
Cause: When a batch is padded to a captured size, seq_lens and out_cache_loc are reset but req_pool_indices is not, so
its last entries are those of an earlier, larger batch.
Change: Before a padded batch is filled in, the indices of its padded rows are set to 0, a row that no request owns.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_PADDING
from sglang_bcg_fixes.anatomy.workarounds import DECODE_PADDING_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, fixed, possible

OLD_BUFFERS = "sglang.srt.model_executor.cuda_graph_runner:DecodeInputBuffers.populate_from_forward_batch"
REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry:build_decode_registry"
ZEROED_SLOT = "GraphSlot('req_pool_indices', _bs, torch.int64, axis='bs', padding_policy=PaddingPolicy.ZERO)"


def probe(source: Source) -> Finding:
    if source.find(REGISTRY):
        slots = source.need(REGISTRY).need_assignment_to("slots")
        if slots.mentions(ZEROED_SLOT):
            return fixed("the registry zeroes req_pool_indices of padded rows", slots)
        return affected("the registry leaves req_pool_indices of padded rows as they are", slots)
    fill = source.need(OLD_BUFFERS)
    if "self.req_pool_indices.zero_" in fill.calls:
        return fixed("padding zeroes req_pool_indices", fill)
    return affected("padding leaves req_pool_indices as they are", fill)


def zero_padded_rows(self: Any, *, raw_bs: int, bs: int, **_: Any) -> None:
    if bs != raw_bs:
        self.req_pool_indices[raw_bs:bs].zero_()


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(where=(OLD_BUFFERS,), how=How.BEFORE, body=zero_padded_rows),),
    workarounds=DECODE_PADDING_OFF,
    verify=("gpt_oss_decode_padding",),
    concerns=possible(DECODE_PADDING),
)
