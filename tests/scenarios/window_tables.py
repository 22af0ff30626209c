# SPDX-License-Identifier: Apache-2.0
"""The table that sliding window layers verify drafts with, made by the real backend's kernel.

With the argument `--apply` also after the fix.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from cpu_sglang import stand_ins
from sglang_bcg_fixes.engine.ledger import Ledger
from sglang_bcg_fixes.fixes import verify_window_untranslated
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(verify_window_untranslated)

DRAFTS = 2


def part(table: list[list[int]], lengths: list[int]) -> Any:
    from sglang.srt.layers.attention import flashattention_backend as module

    metadata = module.FlashAttentionMetadata()
    metadata.page_table = torch.tensor(table, dtype=torch.int32)
    metadata.cache_seqlens_int32 = torch.tensor(lengths, dtype=torch.int32)
    metadata.max_seq_len_k = len(table[0])
    return metadata


def table(has_pool: bool) -> list[Any]:
    from sglang.srt.layers.attention import flashattention_backend as module

    # slot n of all tokens is slot 100 + n of the window's cache
    pool = types.SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: (slots + 100).to(torch.int32))
    backend = types.SimpleNamespace(
        page_size=1, speculative_num_draft_tokens=DRAFTS, token_to_kv_pool=pool, use_sliding_window_kv_pool=has_pool
    )
    before, drafts = part([[1, 2, 3], [4, 5, 0]], [3, 2]), part([[7, 0], [7, 8], [9, 0], [9, 6]], [1, 2, 1, 2])
    module.FlashAttentionBackend._init_sliding_window_attn_spec_metadata(backend, before, drafts)
    made = before.swa_spec_metadata
    rows = [row[:length].tolist() for row, length in zip(made.page_table, made.cache_seqlens_int32, strict=True)]
    return [rows, before.page_table.tolist(), drafts.page_table.tolist()]


def main() -> None:
    stand_ins.install()
    found = {"stock": table(True), "one cache": table(False)}
    if "--apply" in sys.argv:
        Ledger().apply(FIX)
        found["patched"] = table(True)
    telling.result(found)


if __name__ == "__main__":
    main()
