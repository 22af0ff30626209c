"""What a draft of Qwen3-Next makes of a prompt and of its target's states: the real runners, capture and replay."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import inspect, json
from sglang_on_cpu import graphs, one_batch, prefill
one_batch.import_sglang(with_graphs=True)
one_batch.load_plugins()
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_bcg_fixes.plugin import load

# speculation of a hybrid target has states that SGLang allots on a GPU: this target knows nothing of its draft
loaded = one_batch.load("qwen3next")
target = loaded.model_runner
path = target.model_config.model_path
config = ModelConfig.from_server_args(target.server_args, model_path=path, is_draft_model=True)
given = {"model_config": config, "mem_fraction_static": 0.5, "gpu_id": 0, "nccl_port": target.dist_port,
    "server_args": target.server_args, "is_draft_worker": True, "req_to_token_pool": target.req_to_token_pool,
    "token_to_kv_pool_allocator": target.token_to_kv_pool_allocator, "memory_pool_config": target.memory_pool_config}
if "ps" in inspect.signature(ModelRunner.__init__).parameters:
    given["ps"] = target.ps
draft = ModelRunner(**given)
draft.spec_algorithm = SpeculativeAlgorithm.EAGLE
draft.alloc_memory_pool()
draft.init_attention_backends()
draft.init_cuda_graphs(capture_decode_cuda_graph=False)
one_batch.randomize(target.model)
one_batch.randomize(draft.model, seed=1)
batches, make = [], ForwardBatch.init_new

def remember(batch, *rest, **options):
    batches.append(batch)
    return make(batch, *rest, **options)

def drafted(lengths):
    batches.clear()
    ForwardBatch.init_new = remember
    one_batch.generate(loaded, prefill._prompts(lengths), 1)
    ForwardBatch.init_new = make
    states = torch.randn(sum(lengths), config.hidden_size, generator=torch.Generator().manual_seed(5))
    batches[0].spec_info = EagleDraftExtendInput(hidden_states=states.half(), num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1)
    batch = make(batches[0], draft, capture_hidden_mode=CaptureHiddenMode.LAST, return_hidden_states_before_norm=False)
    with torch.no_grad():
        answer = draft.forward(batch).logits_output
    return torch.cat([answer.next_token_logits, answer.hidden_states], -1)

LENGTHS = [6, 5], [11], [5, 4]
eager = [drafted(lengths) for lengths in LENGTHS]

def replayed():
    phase = prefill._graph_config(draft).prefill
    phase.backend, phase.bs = "breakable", [8, 16]
    draft.init_prefill_cuda_graph(force_for_draft_worker=True)
    before = graphs.counters.replays
    answers = [drafted(lengths) for lengths in LENGTHS]
    # a batch is two segments round the one attention layer
    return [graphs.counters.replays - before, *(bool((one == other).all()) for one, other in zip(answers, eager))]

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": replayed()}
for name in applied:
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": replayed()}))
"""


@pytest.mark.parametrize("release", ["0.5.19", "0.5.21", "0.5.23"])
def test_a_replayed_draft_knows_the_states_of_its_target(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_DRAFT_STATES_DROPPED": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["draft_states_dropped"]
    assert found["with"] == [6, True, True, True]
    assert found["without"] == [6, False, False, False]
