# SPDX-License-Identifier: Apache-2.0
"""Wrong answers with --speculative-eagle-topk above 1 (sliding windows, FlashAttention)

Symptom: A model with its own sliding window cache (GPT-OSS and others), verified on FlashAttention with
--speculative-eagle-topk above 1, accepts wrong drafts and answers wrongly, with HTTP 200, with CUDA graphs and without.
Cause: The table of what each draft sees is built from slots of the cache of all tokens. Layers with a sliding window
look these numbers up in their own cache, where they belong to other tokens or to none.
Change: Both parts of that table are translated before they are joined, as in SGLang itself from 0.5.12.
Remove when: No release before 0.5.12 has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import BRANCHES, FLASH_ATTENTION, SPECULATION, WINDOW
from sglang_bcg_fixes.anatomy.workarounds import ONE_BRANCH_OF_DRAFTS
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, fixed, wrong

BACKEND = "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend"
PREPARE = f"{BACKEND}._init_sliding_window_attn_spec_metadata"


def probe(source: Source) -> Finding:
    prepare = source.need(PREPARE)
    if "self.token_to_kv_pool.translate_loc_from_full_to_swa" in prepare.calls:
        return fixed("the slots of drafts and of their prefixes are translated", prepare)
    return affected("the slots of another cache are put into the sliding window's table", prepare)


def translate_both(
    original: Callable[..., None], self: Any, metadata: Any, metadata_expand: Any, metadata_swa: Any = None
) -> None:
    if not self.use_sliding_window_kv_pool:
        return original(self, metadata, metadata_expand, metadata_swa)
    parts = (metadata, metadata_expand)
    tables = [part.page_table for part in parts]
    try:
        for part, table in zip(parts, tables, strict=True):
            part.page_table = self.token_to_kv_pool.translate_loc_from_full_to_swa(table)
        original(self, metadata, metadata_expand, metadata_swa)
    finally:
        # layers without a window still read them
        for part, table in zip(parts, tables, strict=True):
            part.page_table = table


FIX = Fix(
    probe=probe,
    patches=(PatchPoint((PREPARE,), How.AROUND, translate_both),),
    workarounds=ONE_BRANCH_OF_DRAFTS,
    verify=("gpt_oss_decode_padding",),
    concerns=wrong(WINDOW, FLASH_ATTENTION, SPECULATION, BRANCHES),
)
