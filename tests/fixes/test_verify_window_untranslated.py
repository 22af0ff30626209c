"""The table that sliding window layers verify drafts with, put together by the real backend and its kernel."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests import processes

CODE = """
import json, sys, types
from cpu_sglang import stand_ins
stand_ins.install()
import torch
from sglang.srt.layers.attention import flashattention_backend as module
from sglang_bcg_fixes.fixes.verify_window_untranslated import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

DRAFTS = 2

def int32(*values):
    return torch.tensor(values, dtype=torch.int32)

def part(table, lengths):
    metadata = module.FlashAttentionMetadata()
    metadata.page_table, metadata.cache_seqlens_int32 = int32(*table), int32(*lengths)
    metadata.max_seq_len_k = len(table[0])
    return metadata

def table(has_pool):
    # slot n of all tokens is slot 100 + n of the window's cache
    pool = types.SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: (slots + 100).to(torch.int32))
    backend = types.SimpleNamespace(page_size=1, speculative_num_draft_tokens=DRAFTS, token_to_kv_pool=pool,
        use_sliding_window_kv_pool=has_pool)
    before, drafts = part([[1, 2, 3], [4, 5, 0]], [3, 2]), part([[7, 0], [7, 8], [9, 0], [9, 6]], [1, 2, 1, 2])
    module.FlashAttentionBackend._init_sliding_window_attn_spec_metadata(backend, before, drafts)
    made = before.swa_spec_metadata
    rows = [row[:length].tolist() for row, length in zip(made.page_table, made.cache_seqlens_int32)]
    return [rows, before.page_table.tolist(), drafts.page_table.tolist()]

found = {"stock": table(True), "one cache": table(False)}
if "--apply" in sys.argv:
    Ledger().apply(FIX)
    found["patched"] = table(True)
print("RESULT", json.dumps(found))
"""
UNTOUCHED = [[[1, 2, 3], [4, 5, 0]], [[7, 0], [7, 8], [9, 0], [9, 6]]]
OF_ALL_TOKENS = [[1, 2, 3, 7], [1, 2, 3, 7, 8], [4, 5, 9], [4, 5, 9, 6]]
OF_THE_WINDOW = [[100 + slot for slot in row] for row in OF_ALL_TOKENS]


def test_layers_with_a_window_look_into_their_own_cache(release_root: Callable[[str], pathlib.Path]) -> None:
    found, _ = processes.beside(release_root("0.5.11"), "-c", CODE, "--apply")
    assert found["stock"] == [OF_ALL_TOKENS, *UNTOUCHED]
    assert found["patched"] == [OF_THE_WINDOW, *UNTOUCHED]
    assert found["one cache"] == [OF_ALL_TOKENS, *UNTOUCHED]


def test_later_releases_do_so_by_themselves(release_root: Callable[[str], pathlib.Path]) -> None:
    found, _ = processes.beside(release_root("0.5.12"), "-c", CODE)
    assert found["stock"] == [OF_THE_WINDOW, *UNTOUCHED]
