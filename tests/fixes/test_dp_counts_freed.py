"""Which rows are a rank's own, computed by SGLang in a captured graph and read after a replay."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json
from cpu_sglang import graphs, one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
import torch
from sglang.srt.layers import dp_attention
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

loaded = one_batch.load("llama")
runner = loaded.model_runner
one_batch.randomize(runner.model)
layers, rows = runner.model.model.forward, {}

def forward(input_ids, positions, forward_batch, *rest):
    hidden = layers(input_ids, positions, forward_batch, *rest)
    if forward_batch.global_num_tokens_gpu is not None:
        rows[len(input_ids)] = torch.stack([item.long() for item in dp_attention.get_dp_local_info(forward_batch)])
    return hidden

runner.model.model.forward = forward
dp_attention.get_attention_dp_rank = lambda: 1
graphs.freed_memory_is_garbage = True

# what stands there is a default, so that a read-back sees that it is still called
def of_two_ranks(self, num_tokens, prepare=PrefillCudaGraphRunner.capture_prepare):
    self.require_mlp_tp_gather, self.dp_size = True, 2
    return prepare(self, num_tokens)

PrefillCudaGraphRunner.capture_prepare = of_two_ranks
prefill.capture_prefill(runner)
captured, before = rows[8].tolist(), graphs.counters.replays
one_batch.generate(loaded, prefill._prompts([6]), 1)
print("RESULT", json.dumps([captured, rows[8].tolist(), graphs.counters.replays > before]))
"""


@pytest.mark.parametrize("flag", ["off", "on"])
def test_a_replay_computes_the_rows_of_its_capture(release_root: Callable[[str], pathlib.Path], flag: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_DP_COUNTS_FREED": flag}
    captured, replayed, is_replayed = processes.beside(release_root("0.5.16"), "-c", CODE, **only)[0]
    assert is_replayed and captured == [8, 8]
    assert replayed == (captured if flag == "on" else [0x7F7F7F7F] * 2)
