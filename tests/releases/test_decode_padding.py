"""Decode batches that are padded to a captured size: the real buffers and the real KV pool, red and green."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from tests import processes

Root = Callable[[str], pathlib.Path]
RELEASES = ("0.5.11", "0.5.12", "0.5.12.post1")
FIXES = ("DECODE_REQ_INDICES_STALE", "SWA_STALE_PADDING")

PRELUDE = """
import json, types
from sglang_on_cpu import stand_ins
stand_ins.install()
import torch
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.model_executor.cuda_graph_runner import DecodeInputBuffers

def buffers():
    return DecodeInputBuffers.create(
        device="cpu", max_bs=4, max_num_token=4, hidden_size=8, vocab_size=8, dtype=torch.float32, dp_size=1, pp_size=1,
        is_encoder_decoder=False, require_mlp_tp_gather=False, seq_len_fill_value=1, encoder_len_fill_value=0,
        num_tokens_per_bs=1, cache_loc_dtype=torch.int64, enable_mamba_track=False, is_hybrid_swa=True)

def fill(target, rows, slots, bs=4):
    count = len(rows)
    batch = types.SimpleNamespace(
        input_ids=torch.arange(count), req_pool_indices=torch.tensor(rows), seq_lens=torch.full((count,), 9),
        out_cache_loc=torch.tensor(slots) + 100, out_cache_loc_swa=torch.tensor(slots, dtype=torch.int32),
        positions=torch.full((count,), 8), seq_lens_cpu=torch.full((count,), 9, dtype=torch.int32),
        mrope_positions=None, encoder_lens=None, mamba_track_indices=None, mamba_track_mask=None)
    target.populate_from_forward_batch(
        forward_batch=batch, raw_bs=count, raw_num_token=count, bs=bs, seq_len_fill_value=1,
        require_gathered_buffer=False, num_tokens_per_bs=1, nsa_enable_prefill_cp=False,
        enable_num_token_non_padded_flag=False)
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
START = """
from sglang.srt.model_executor.breakable_cuda_graph_runner import BreakableCudaGraphRunner
shared = buffers()
shared.share_buffers()
runner = BreakableCudaGraphRunner.__new__(BreakableCudaGraphRunner)
runner.__dict__.update(device="cpu", max_num_tokens=4, max_bs=4, is_multimodal=False)
model_runner = types.SimpleNamespace(
    device="cpu", is_hybrid_swa=True, dtype=torch.float32,
    model_config=types.SimpleNamespace(hidden_size=8, dtype=torch.float32))
try:
    runner._init_buffers(model_runner)
except AssertionError as error:
    print("RESULT", json.dumps({"refused": str(error)}))
else:
    print("RESULT", json.dumps({"types": sorted({str(shared.out_cache_loc_swa.dtype),
                                                 str(runner.buffers.out_cache_loc_swa.dtype)})}))
"""


@pytest.fixture
def run(release_root: Root, tmp_path: pathlib.Path) -> Callable[..., dict]:
    def run(release: str, code: str, **environ: str) -> dict:
        done = processes.python(
            "-c",
            PRELUDE + code,
            paths=[release_root(release), processes.REPOSITORY / "tools"],
            environment={
                "TRITON_INTERPRET": "1",
                "SGLANG_PLUGINS": "bcg_fixes",
                "SGLANG_BCG_FIXES": "strict",
                "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"),
                **environ,
            },
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
        return json.loads(line.removeprefix("RESULT "))

    return run


def off(*names: str) -> dict[str, str]:
    return {f"SGLANG_BCG_FIX_{name}": "off" for name in names}


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_fixes_padded_rows_keep_what_an_earlier_batch_left(run: Callable[..., dict], release: str) -> None:
    found = run(release, ROWS, **off(*FIXES))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found["rows"] == [1, 2, 3, 4]
    # 0.5.12 mended the slots itself
    assert found["slots"] == ([5, 6, 7, 8] if release == "0.5.11" else [5, 6, 7, 0])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("alone", [None, *FIXES])
def test_with_the_fixes_padded_rows_are_nobodys(run: Callable[..., dict], release: str, alone: str | None) -> None:
    found = run(release, ROWS, **off(*(name for name in FIXES if alone not in (None, name))))
    assert found["whole"] == [[1, 2, 3, 4], [5, 6, 7, 8]], "a batch that is not padded is filled in as before"
    assert found["rows"] == [1, 2, 3, 4 if alone == "SWA_STALE_PADDING" else 0]
    stale = release == "0.5.11" and alone == "DECODE_REQ_INDICES_STALE"
    assert found["slots"] == [5, 6, 7, 8 if stale else 0]


def test_without_the_fix_a_padded_replay_overwrites_another_requests_slot(run: Callable[..., dict]) -> None:
    assert run("0.5.11", SLOTS, **off("SWA_STALE_PADDING")) == {"untouched": False, "written": [True] * 3}


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_a_padded_replay_leaves_every_other_slot_alone(run: Callable[..., dict], release: str) -> None:
    assert run(release, SLOTS) == {"untouched": True, "written": [True] * 3}


@pytest.mark.parametrize("release", ["0.5.12", "0.5.12.post1"])
def test_without_the_fix_the_breakable_runner_does_not_start(run: Callable[..., dict], release: str) -> None:
    assert "out_cache_loc_swa has different dtype" in run(release, START, **off("SWA_STALE_PADDING"))["refused"]


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_the_breakable_runner_shares_the_decode_buffer(run: Callable[..., dict], release: str) -> None:
    assert run(release, START) == {"types": ["torch.int64" if release == "0.5.11" else "torch.int32"]}
