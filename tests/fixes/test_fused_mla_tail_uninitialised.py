"""The padded rows behind the break of sparse latent attention, round a backend that computes the real rows."""

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
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang_bcg_fixes.plugin import load

HEADS, ROWS, REAL, SIZE = 2, 8, 5, 4
batch = types.SimpleNamespace(num_token_non_padded_cpu=REAL, out_cache_loc=torch.arange(ROWS))
context = types.SimpleNamespace(forward_batch=batch, attention_layers=[None], mha_companion_layers=None,
    num_tokens=ROWS, raw_num_tokens=REAL)
attend = lambda query, *rest, **options: query.flatten(1) + 1
for name in ("get_tc_piecewise_forward_context", "get_forward_context"):
    if hasattr(radix_attention, name):
        setattr(radix_attention, name, lambda: context)
radix_attention.get_attn_backend = lambda: types.SimpleNamespace(forward=attend)

def run():
    query = torch.arange(HEADS * ROWS * SIZE).view(HEADS, ROWS, SIZE).float()
    absorbed = torch.full_like(query, float("nan"))
    output = torch.full((ROWS, HEADS * SIZE), float("nan"))
    forward_mla.bcg_mla_bmm_then_unified_attention(
        query, torch.eye(SIZE).expand(HEADS, -1, -1), absorbed, absorbed.transpose(0, 1), torch.zeros(ROWS, 1, SIZE),
        output, False, 0, torch.zeros(ROWS, HEADS, 2), torch.zeros(ROWS, 1, 2))
    expected = query.transpose(0, 1).flatten(1)[:REAL] + 1
    tail = output[REAL:]
    kind = "nan" if tail.isnan().all() else "zero" if (tail == 0).all() else "other"
    return [kind, bool((output[:REAL] == expected).all())]

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": run()}
for name in applied:
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": run()}))
"""


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.16"])
def test_padded_rows_are_zero_and_real_rows_as_before(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_FUSED_MLA_TAIL_UNINITIALISED": "on"}
    found, _ = processes.beside(release_root(release), "-c", CODE, **only)
    affected = release == "0.5.15.post1"
    assert found["applied"] == (["fused_mla_tail_uninitialised"] if affected else [])
    assert found["with"] == ["zero", True]
    assert found["without"] == ["nan" if affected else "zero", True]
