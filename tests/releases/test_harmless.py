"""What `sglang_bcg_fixes/cli/harmless.py` says of real releases."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.wheels import NEWEST

PRELUDE = """
import json, types
from unittest import mock
from cpu_sglang import stand_ins
stand_ins.install()
import torch
"""
IDLE_LAYERS = """
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import bailing_moe_linear, minicpm

idle = types.SimpleNamespace(forward_mode=ForwardMode.IDLE)
rows, layer = torch.zeros(0, 8), mock.MagicMock()
# to 0.5.20 the residual goes along
for step in ("prepare_attn", "prepare_mlp", "postprocess_layer"):
    getattr(layer.layer_communicator, step).return_value = (rows, rows)
forward = bailing_moe_linear.BailingMoELinearDecoderLayer.forward
given = {"hidden_states": rows, "positions": rows, "forward_batch": idle, "residual": rows, "zero_allocator": None}
names = forward.__code__.co_varnames[1 : forward.__code__.co_argcount]
forward(layer, **{name: given[name] for name in names})
found = {"bailing": [layer.attention.called, layer.mlp.called]}
if hasattr(minicpm, "MiniCPMLightningMixer"):
    mixer = mock.MagicMock(hidden_size=8)
    answer = minicpm.MiniCPMLightningMixer.forward(mixer, positions=rows, hidden_states=rows, forward_batch=idle)
    found["minicpm"] = [mixer.attn.called, list(answer.shape)]
print("RESULT", json.dumps(found))
"""
DRAFT_ROWS = """
from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as single
from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as multi

ROWS, TOKENS = 4, 3

class Filled(Exception):
    pass

class Values(dict):
    "Buffers that are asked for by attribute and, in earlier releases, by key."
    __getattr__ = dict.__getitem__

def buffers():
    counted = ("num_accepted_drafts", "num_accepted_tokens", "num_correct_drafts", "num_accept_tokens", "select_index")
    rows = {name: torch.zeros(ROWS, dtype=torch.int64) for name in ("seq_lens", "extend_seq_lens", "extend_start_loc",
        "req_pool_indices", "seq_lens_cpu", *counted)}
    tokens = {name: torch.zeros(ROWS * TOKENS, dtype=torch.int64) for name in ("input_ids", "out_cache_loc",
        "swa_out_cache_loc", "positions")}
    return Values(rows | tokens | {"hidden_states": torch.zeros(ROWS * TOKENS, 2)})

def batch(count):
    rows = torch.arange(1, count + 1)
    spec_info = types.SimpleNamespace(hidden_states=torch.ones(count * TOKENS, 2), num_accepted_drafts=rows - rows,
        num_accepted_tokens=rows, num_correct_drafts=rows - rows, num_accept_tokens=rows)
    return types.SimpleNamespace(batch_size=count, input_ids=torch.ones(count * TOKENS, dtype=torch.int64),
        seq_lens=rows + 40, seq_lens_cpu=rows + 40, seq_lens_sum=0, extend_seq_lens=rows - rows + TOKENS,
        extend_seq_lens_cpu=[TOKENS] * count, extend_start_loc=(rows - 1) * TOKENS, req_pool_indices=rows,
        out_cache_loc=torch.arange(count * TOKENS) + 100, positions=torch.arange(count * TOKENS), spec_info=spec_info)

def runner(held):
    fake = mock.MagicMock(buffers=held, cuda_graph_buffers=held, capture_bs=[ROWS], num_tokens_per_bs=TOKENS,
        require_mlp_tp_gather=False, require_gathered_buffer=False, seq_len_fill_value=1, device="cpu",
        extend_seq_lens_cpu=[TOKENS] * ROWS)
    fake.get_runner.return_value._pad_to_bucket.return_value = ROWS
    fake._replay.side_effect = Filled
    return fake

def fill_single(fake, batch):
    try:
        single.EAGLEDraftExtendCudaGraphRunner.replay(fake, batch)
    except Filled:
        pass

def fill_multi(fake, batch):
    steps = multi.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner
    if hasattr(steps, "prepare"):
        steps.prepare(fake, batch)
        return
    steps.reset_buffers(fake, batch, types.SimpleNamespace(accept_lens=batch.req_pool_indices))
    of_step = multi.MultiLayerEagleDraftExtendCudaGraphRunner
    of_step.init_replay_state(fake, batch, ROWS, batch.batch_size, batch.batch_size * TOKENS)

def padded(fill):
    held = buffers()
    for count in (4, 3):
        fill(runner(held), batch(count))
    tail = slice(3 * TOKENS, None)
    return {"request": int(held.req_pool_indices[3]), "length": int(held.seq_lens[3]),
        "host length": int(held.seq_lens_cpu[3]), "slots": held.out_cache_loc[tail].tolist(),
        "real": held.out_cache_loc[:3 * TOKENS].tolist()}

found = {"multi": padded(fill_multi)}
if hasattr(single.EAGLEDraftExtendCudaGraphRunner, "replay"):
    found["single"] = padded(fill_single)
print("RESULT", json.dumps(found))
"""
REGISTRY = """
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry

registry = build_decode_registry(device=torch.device("cpu"), max_bs=4, max_num_token=4, seq_len_fill_value=1,
    cache_loc_dtype=torch.int64, enable_mamba_track=True)

def fill(count, **fields):
    batch = mock.MagicMock(spec=[], **{name: None for name in registry.slot_names()} | fields)
    registry.fill_from(batch, raw_bs=count, padded_bs=4, raw_num_tokens=count, padded_num_tokens=4)
    return registry.get_slot("mamba_track_mask").buffer.tolist()

mask = torch.tensor([True] * 4)
found = {"full": fill(4, mamba_track_mask=mask), "idle": fill(0), "padded": fill(2, mamba_track_mask=mask[:2])}
print("RESULT", json.dumps(found))
"""
RUNNER = """
from cpu_sglang import one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()

loaded = one_batch.load("qwen3next")
runner = loaded.model_runner
one_batch.randomize(runner.model)
prompts = prefill._prompts([6, 5])
eager = one_batch.generate(loaded, prompts, 2)[1]
prefill.capture_prefill(runner)
states = runner.req_to_token_pool.mamba_pool.mamba_cache
poisoned = 0
for state in (*states.conv, states.temporal):
    state.fill_(float("nan"))
    poisoned += state.numel()
equal = bool((one_batch.generate(loaded, prompts, 2)[1] == eager).all())
# a stage of the pipeline has the layers of the model but not all of them
runner.model_config.num_hidden_layers += 1
try:
    prefill.capture_prefill(runner)
    outcome = "captured"
except RuntimeError as nothing:
    outcome = str(nothing)
print("RESULT", json.dumps({"poisoned": poisoned, "equal": equal, "outcome": outcome}))
"""
BUCKETS = """
from cpu_sglang import graphs, one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang.srt.layers.moe import topk

loaded = one_batch.load("llama", chunked_prefill_size=256)
runner = loaded.model_runner
one_batch.randomize(runner.model)
prompts = prefill._prompts([100, 90])
eager = one_batch.generate(loaded, prompts, 2)[1]
prefill.capture_prefill(runner, (8, 256))
before = graphs.counters.replays
equal = bool((one_batch.generate(loaded, prompts, 2)[1] == eager).all())

chosen = torch.arange(10, dtype=torch.int32).view(5, 2)
masked = chosen.clone()
topk._mask_topk_ids_padded_region(masked, torch.tensor(3))
print("RESULT", json.dumps({"context": runner.model_config.context_len, "equal": equal,
    "replayed": graphs.counters.replays > before, "of tokens": bool((masked[:3] == chosen[:3]).all()),
    "of padding": masked[3:].unique().tolist()}))
"""
INDEXER = """
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

backend = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
full = types.SimpleNamespace(get_indexer_metadata=lambda layer_id, forward_batch: f"full {layer_id} {forward_batch}")
backend.full_attn_layers, backend.full_attn_backend = [1, 3], full
print("RESULT", json.dumps([backend.get_indexer_metadata(layer, "batch") for layer in (1, 3, 7)]))
"""


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path]) -> Callable[[str, str], Any]:
    def run(release: str, code: str) -> Any:
        return processes.beside(release_root(release), "-c", PRELUDE + code, SGLANG_PLUGINS="__none__")[0]

    return run


@pytest.mark.parametrize("release", ["0.5.11", NEWEST])
def test_an_idle_batch_reaches_no_linear_layer(run: Callable[[str, str], Any], release: str) -> None:
    found = run(release, IDLE_LAYERS)
    attention, mlp = found["bailing"]
    assert not attention and mlp
    assert found.get("minicpm") == (None if release == "0.5.11" else [False, [0, 8]])


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.15.post1"])
def test_padded_rows_of_a_draft_extend_store_to_nobodys_slot(run: Callable[[str, str], Any], release: str) -> None:
    found = run(release, DRAFT_ROWS)
    expected = {"request": 4, "length": 1, "host length": 1, "slots": [0] * 3, "real": list(range(100, 109))}
    assert found["multi"] == expected, "the request is the earlier one's"
    if release == "0.5.12.post1":
        assert found["single"] == expected


def test_an_idle_batch_clears_the_mask_of_checkpoints(run: Callable[[str, str], Any]) -> None:
    assert run(NEWEST, REGISTRY) == {"full": [True] * 4, "idle": [False] * 4, "padded": [True, True, False, False]}


@pytest.mark.parametrize("release", ["0.5.20", NEWEST])
def test_a_layer_with_an_indexer_gets_the_metadata_of_full_attention(
    run: Callable[[str, str], Any], release: str
) -> None:
    # 7 is in no list: a draft's
    assert run(release, INDEXER) == ["full 1 batch", "full 3 batch", "full 7 batch"]


@pytest.fixture(scope="module")
def large_bucket(release_root: Callable[[str], pathlib.Path]) -> Any:
    return processes.beside(release_root("0.5.15.post1"), "-c", PRELUDE + BUCKETS, SGLANG_PLUGINS="__none__")[0]


def test_a_graph_larger_than_the_context_is_right_for_several_requests(large_bucket: Any) -> None:
    assert large_bucket["context"] < 256
    assert large_bucket["replayed"] and large_bucket["equal"]


def test_the_mask_of_padding_changes_the_experts_of_padded_rows_only(large_bucket: Any) -> None:
    assert large_bucket["of tokens"] and large_bucket["of padding"] == [-1]


@pytest.fixture(scope="module")
def hybrid_runner(release_root: Callable[[str], pathlib.Path]) -> Any:
    return processes.beside(release_root("0.5.18"), "-c", PRELUDE + RUNNER, SGLANG_PLUGINS="__none__")[0]


def test_a_new_request_does_not_see_what_is_in_its_state_slot(hybrid_runner: Any) -> None:
    assert hybrid_runner["poisoned"] and hybrid_runner["equal"]


def test_a_pipeline_stage_captures_no_prefill_graph(hybrid_runner: Any) -> None:
    assert hybrid_runner["outcome"].endswith("captured nothing: SGLang's log says why")
