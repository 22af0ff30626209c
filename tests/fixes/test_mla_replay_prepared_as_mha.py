"""A tiny DeepSeek under breakable graphs of the release that prepares its replays wrongly."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import mla_replay_prepared_as_mha as fix
from tests import processes

PRELUDE = """
import json, sys, types
from sglang_on_cpu import graphs, one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
from sglang_bcg_fixes import graph_break
from sglang_bcg_fixes.plugin import load

ID, PROMPTS = "mla_replay_prepared_as_mha", [[5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
loaded = one_batch.load("deepseek_v2", attention_backend="fa3")
model = loaded.model_runner.model
one_batch.randomize(model)
# the absorbed weights are made from the others
model.post_load_weights()
tokens, logits = one_batch.generate(loaded, PROMPTS, 3)
runner = prefill.capture_prefill(loaded.model_runner, (8, 16))
# as on an NVIDIA GPU: where it is false, captures are taken to be of the expanded form
sys.modules[type(runner).__module__].is_cuda = lambda: True
ledger = load().ledger
found = {"applied": ID in ledger.applied()}
again, replayed = one_batch.generate(loaded, PROMPTS, 3)
found |= {"same": again == tokens, "off": (replayed - logits).abs().max().item(), "replays": graphs.counters.replays}
"""
CODE = """
import torch
from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

batch = types.SimpleNamespace(
    forward_mode=ForwardMode.EXTEND, extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[3], seq_lens_cpu=[3],
    seq_lens=torch.tensor([3]), extend_prefix_lens=torch.tensor([0]), req_pool_indices=None, seq_lens_sum=3,
    attn_dcp_metadata=None, attn_cp_metadata=None)

def planned():
    "Whether the absorbed form is planned, and for which of FlashInfer's kernels."
    plans, backend = [], object.__new__(TRTLLMMLABackend)
    backend.prefill_wrapper_paged, backend.disable_chunked_prefix_cache = None, False
    update = lambda *_, use_ragged, **__: plans.append("ragged" if use_ragged else "paged")
    backend.indices_updater_prefill = types.SimpleNamespace(update=update)
    backend.init_forward_metadata(batch)
    return [backend.forward_prefill_metadata.fallback_to_flashinfer_impl, *plans]

def plans():
    outside = planned()
    with graph_break.load("context").enable_breakable_cuda_graph():
        return {"eager": outside, "under a graph": planned()}

found["plans"] = plans()
ledger.undo(ID)
found["stock plans"] = plans()
try:
    one_batch.generate(loaded, PROMPTS, 3)
except RuntimeError as error:
    found["error"] = str(error)
print("RESULT", json.dumps(found))
"""


def test_the_first_replay_is_answered_and_ends_the_server_without(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", fix.FIX.flag: "on"}
    found, _ = processes.beside(release_root("0.5.17"), "-c", PRELUDE + CODE, **only)
    # the two forms round differently, in float16 and with logits of about 2
    assert found["applied"] and found["same"] and 0 < found["off"] < 0.005, found
    assert "is invalid for input of size" in found["error"]
    # TensorRT-LLM's kernels are not run here: they are for Blackwell alone
    assert found["plans"] == {"eager": [False], "under a graph": [True, "paged"]}
    assert found["stock plans"] == {"eager": [False], "under a graph": [False]}


@pytest.mark.parametrize(("release", "form"), [("0.5.16", "expanded"), ("0.5.18", "absorbed"), ("0.5.23", "absorbed")])
def test_the_releases_round_it_need_no_fix(
    release_root: Callable[[str], pathlib.Path], release: str, form: str
) -> None:
    found, _ = processes.beside(
        release_root(release), "-c", PRELUDE + 'print("RESULT", json.dumps(found))', SGLANG_BCG_FIXES="off"
    )
    assert not found["applied"] and found["same"] and found["replays"], found
    # eager prefill is of the expanded form
    assert found["off"] == 0 if form == "expanded" else 0 < found["off"] < 0.005, found


@pytest.mark.parametrize(
    ("graphs", "attention", "companions"),
    [
        ("FullCudaGraphBackend", "fa3", True),
        ("BreakableCudaGraphBackend", "fa4", True),
        ("BreakableCudaGraphBackend", "fa3", False),
    ],
)
def test_other_graphs_backends_and_models_are_left_alone(graphs: str, attention: str, companions: bool) -> None:
    runner = types.SimpleNamespace(
        backend=type(graphs, (), {})(),
        has_mha_companion_layers=companions,
        model_runner=types.SimpleNamespace(prefill_attention_backend_str=attention),
    )
    # it would fail if it were asked for anything
    batch = object()
    assert fix.in_the_absorbed_form(batch, runner, "the batch") is batch
