"""Which tokens a rank stores with decode context parallelism, asked of the Triton backend inside a padded break."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json, types
from cpu_sglang import one_batch
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
import torch
from sglang.srt.layers import radix_attention
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang_bcg_fixes.plugin import load

ROWS, REAL, SIZE, RANKS = 8, 5, 4, 2
batch = types.SimpleNamespace(num_token_non_padded_cpu=REAL, positions=torch.arange(ROWS), dcp_kv_mask=None,
    out_cache_loc=torch.arange(ROWS))
context = types.SimpleNamespace(forward_batch=batch, attention_layers=[None], mha_companion_layers=None,
    num_tokens=ROWS, raw_num_tokens=REAL)
for name in ("get_tc_piecewise_forward_context", "get_forward_context"):
    if hasattr(radix_attention, name):
        setattr(radix_attention, name, lambda: context)
stored = []

def store(layer, slots, keys, values, *scales, dcp_kv_mask):
    stored.append(dcp_kv_mask)

def attend(query, key, value, layer, forward_batch, *rest, **options):
    pool = types.SimpleNamespace(set_kv_buffer=store)
    rank = types.SimpleNamespace(dcp_size=RANKS, dcp_rank=1, token_to_kv_pool=pool)
    TritonAttnBackend._set_kv_buffer(rank, forward_batch, layer, forward_batch.out_cache_loc, key, value)
    return query + 1

radix_attention.get_attn_backend = lambda: types.SimpleNamespace(forward=attend)

def own_tokens():
    rows = torch.zeros(ROWS, SIZE)
    radix_attention.breakable_unified_attention_with_output(rows, rows, rows, torch.zeros(ROWS, SIZE), True, 0)
    mask = stored.pop()
    return [None if mask is None else mask.tolist(), len(batch.positions)]

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": own_tokens()}
for name in reversed(applied):
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": own_tokens()}))
"""


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.17"])
def test_a_rank_stores_its_own_tokens_only(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    names = ["attention_tail_uninitialised", "break_positions_padded"]
    flags = {f"SGLANG_BCG_FIX_{name.upper()}": "on" for name in names}
    found, _ = processes.beside(release_root(release), "-c", CODE, SGLANG_BCG_FIXES="off", **flags)
    # both change this break where both are needed
    assert found["applied"] == (names if release == "0.5.15.post1" else names[1:])
    assert found["with"] == [[False, True, False, True, False], 8]
    assert found["without"] == [None, 8]
