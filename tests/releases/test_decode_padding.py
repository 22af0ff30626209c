"""Decode batches that are padded to a captured size: the real buffers and the real KV pool, red and green."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes

Root = Callable[[str], pathlib.Path]
RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1")
PIECEWISE = "sglang.srt.model_executor.piecewise_cuda_graph_runner:PiecewiseCudaGraphRunner.__init__"
FIXES = ("DECODE_REQ_INDICES_STALE", "SWA_STALE_PADDING")

PRELUDE = """
import json, types
from cpu_sglang import stand_ins
stand_ins.install()
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from tests.releases.decode_buffers import breakable_runner_shares, buffers, fill
"""
ROWS = """
shared = buffers()
fill(shared, [1, 2, 3, 4], [5, 6, 7, 8])
whole = [shared.req_pool_indices.tolist(), shared.out_cache_loc_swa.tolist()]
fill(shared, [1, 2, 3], [5, 6, 7])
print("RESULT", json.dumps({
    "whole": whole, "rows": shared.req_pool_indices.tolist(), "slots": shared.out_cache_loc_swa.tolist()}))
"""
# request four has left the batch, and another one has its slot: what a padded replay stores there is lost
SLOTS = """
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
pool = SWAKVPool(
    size=16, size_swa=16, page_size=1, dtype=torch.float32, head_num=1, head_dim=4, swa_attention_layer_ids=[0],
    full_attention_layer_ids=[1], enable_kvcache_transpose=False, device="cpu")
shared = buffers()
shared.share_buffers()
fill(shared, [1, 2, 3, 4], [5, 6, 7, 8])
keys, values = pool.get_kv_buffer(0)
keys.fill_(1.5), values.fill_(2.5)
fill(shared, [1, 2, 3], [5, 6, 7])
pool.set_swa_loc(shared.out_cache_loc_swa[:4])
layer = types.SimpleNamespace(layer_id=0)
pool.set_kv_buffer(layer, shared.out_cache_loc[:4], torch.full((4, 1, 4), torch.nan), torch.full((4, 1, 4), torch.nan))
print("RESULT", json.dumps({
    "untouched": bool((keys[8] == 1.5).all() and (values[8] == 2.5).all()),
    "written": [bool(keys[slot].isnan().all()) for slot in (5, 6, 7)]}))
"""
# eager locations are int32, those of a graph have their buffer's type
STORED = """
from sglang.srt.layers.attention.triton_ops.trtllm_fp8_kv_kernel import fused_fp8_set_kv_buffer
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
graph = buffers()
graph.share_buffers()
fill(graph, [1, 2, 3, 4], [5, 6, 15, 8])
keys, values = torch.randn(2, 4, 1, 16)
layer = types.SimpleNamespace(layer_id=0)

def stored(locations):
    pool = SWAKVPool(
        size=16, size_swa=16, page_size=1, dtype=torch.float32, head_num=1, head_dim=16, swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1], enable_kvcache_transpose=False, device="cpu")
    pool.set_swa_loc(locations)
    pool.set_kv_buffer(layer, graph.out_cache_loc, keys, values)
    fused = torch.zeros(2, 16, 1, 16, dtype=torch.float8_e4m3fn)
    fused_fp8_set_kv_buffer(keys, values, *fused, locations, page_size=1)
    return [*pool.get_kv_buffer(0), *fused.float()]

eager = torch.tensor([5, 6, 15, 8], dtype=torch.int32)
pairs = list(zip(stored(eager), stored(graph.out_cache_loc_swa)))
print("RESULT", json.dumps({
    "types": [str(eager.dtype), str(graph.out_cache_loc_swa.dtype)],
    "same": [torch.equal(*pair) for pair in pairs],
    "slots": [cache.flatten(1).any(1).nonzero().flatten().tolist() for cache, _ in pairs]}))
"""
START = """
print("RESULT", json.dumps(breakable_runner_shares(buffers())))
"""


@pytest.fixture
def run(release_root: Root) -> Callable[..., Any]:
    def run(release: str, code: str, **environ: str) -> Any:
        return processes.beside(
            release_root(release), "-c", PRELUDE + code, **{"SGLANG_BCG_FIXES": "strict", **environ}
        )[0]

    return run


def off(*names: str) -> dict[str, str]:
    return {f"SGLANG_BCG_FIX_{name}": "off" for name in names}


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_fixes_padded_rows_keep_what_an_earlier_batch_left(run: Callable[..., Any], release: str) -> None:
    found = run(release, ROWS, **off(*FIXES))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found["rows"] == [1, 2, 3, 4]
    # 0.5.12 mended the slots itself
    assert found["slots"] == ([5, 6, 7, 8] if release == "0.5.11" else [5, 6, 7, 0])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("alone", [None, *FIXES])
def test_with_the_fixes_padded_rows_are_nobodys(run: Callable[..., Any], release: str, alone: str | None) -> None:
    found = run(release, ROWS, **off(*(name for name in FIXES if alone not in (None, name))))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]], "a batch that is not padded is filled in as before"
    assert found["rows"] == [1, 2, 3, 4 if alone == "SWA_STALE_PADDING" else 0]
    stale = release == "0.5.11" and alone == "DECODE_REQ_INDICES_STALE"
    assert found["slots"] == [5, 6, 7, 8 if stale else 0]


def test_without_the_fix_a_padded_replay_overwrites_another_requests_slot(run: Callable[..., Any]) -> None:
    assert run("0.5.11", SLOTS, **off("SWA_STALE_PADDING")) == {"untouched": False, "written": [True] * 3}


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_a_padded_replay_leaves_every_other_slot_alone(run: Callable[..., Any], release: str) -> None:
    assert run(release, SLOTS) == {"untouched": True, "written": [True] * 3}


@pytest.mark.parametrize("release", ["0.5.12", "0.5.12.post1"])
def test_without_the_fix_the_breakable_runner_does_not_start(run: Callable[..., Any], release: str) -> None:
    assert "out_cache_loc_swa has different dtype" in run(release, START, **off("SWA_STALE_PADDING"))


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_the_breakable_runner_shares_the_decode_buffer(run: Callable[..., Any], release: str) -> None:
    assert run(release, START) == ["torch.int64" if release == "0.5.11" else "torch.int32"]


def test_the_first_releases_int64_slots_store_what_eager_ones_do(run: Callable[..., Any], release_root: Root) -> None:
    found = run("0.5.11", STORED)
    assert found["types"] == ["torch.int32", "torch.int64"]
    assert found["same"] == [True] * 4
    assert found["slots"] == [[5, 6, 8, 15]] * 4
    # the kernel that a GPU stores with, and the third runner, whose constructor wants a whole model
    folder = Folder(release_root("0.5.11"))
    kernel = folder.read("sglang/jit_kernel/csrc/elementwise/kvcache.cuh")
    assert kernel and "with_dtype<int32_t, int64_t>(indice_dtype)" in kernel
    piecewise = Source(folder).need(PIECEWISE).need_assignment_to("out_cache_loc_swa")
    assert piecewise.mentions("torch.int64")
