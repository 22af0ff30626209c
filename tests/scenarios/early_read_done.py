# SPDX-License-Identifier: Apache-2.0
"""The scheduler's tables written as early as a graph runner's event allows: does the replayed step still see its own?

The runners and attention backends are a release's own, and so is the event. As the event is recorded for the last time,
the scheduler's write happens, which on a GPU is a matter of luck.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch

from cpu_sglang import draft_extend, graphs, one_batch, prefill
from tests.scenarios import telling

STEP = draft_extend.Step(prefix=(20, 5), new=(draft_extend.NEW_TOKENS,) * 2, seq_lens=(24, 9))


class Watched(graphs.Event):
    """An event that counts how often events are recorded, and acts at the last time."""

    records = 0
    last = 0
    act: Callable[[], object]

    def record(self, stream: graphs.Stream | None = None) -> None:
        super().record(stream)
        Watched.records += 1
        if Watched.records == Watched.last:
            Watched.act()


def written_at_once(step: Callable[[], Any], table: torch.Tensor) -> list[Any]:
    """The number of events that the step records, and whether it gives the same if written to at the last one."""
    kept = table.clone()
    Watched.records = Watched.last = 0
    undisturbed = step()
    Watched.records, Watched.last = 0, Watched.records
    Watched.act = lambda: table.copy_(kept.roll(1, 1))
    assert Watched.last, "the runner records no event"
    disturbed = step()
    table.copy_(kept)
    return [Watched.last, undisturbed == disturbed]


def draft() -> None:
    """Replay a draft's extend step on FlashAttention, which reads the table in the graph from 0.5.16."""
    requests = draft_extend.load("llama")
    backend = draft_extend.Flash(requests, draft_extend.PAGE_SIZE)
    captured = requests.capture_batch(STEP)
    runner = draft_extend.runner_of(backend, captured, STEP, multi_layer=False)
    captured.extend_seq_lens = runner.buffers.extend_seq_lens
    graph = torch.cuda.CUDAGraph()
    with backend.in_use():
        backend.capture(STEP, captured)
        with torch.cuda.graph(graph):
            backend.backend.init_forward_metadata_in_graph(captured)

    def replay(*_: Any) -> Any:
        graph.replay()
        return types.SimpleNamespace(next_token_logits=torch.zeros(8, 1), hidden_states=torch.zeros(16, 1))

    vars(runner).update(
        device_module=types.SimpleNamespace(Event=Watched), _make_graph_key=lambda *_: None, _replay_graph=replay
    )

    def step() -> dict[str, Any]:
        with backend.in_use():
            draft_extend.fill(runner, STEP, requests.batch(STEP))
        return {
            name: getattr(backend.backend.forward_metadata, name).tolist()
            for name in ("page_table", "cache_seqlens_int32")
        }

    telling.with_and_without(lambda: written_at_once(step, requests.table))


def flashinfer() -> None:
    """Look for backends that prepare in a graph in FlashInfer's, which names kernels as others name their parts."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    from sglang_bcg_fixes.anatomy.read_done import preparing_in_graph

    backend: Any = object.__new__(FlashInferAttnBackend)
    # as its constructor, which needs a GPU, does
    backend.prefill_backend = backend.decode_backend = "fa2"
    telling.result([type(part).__name__ for part in preparing_in_graph(backend)])


def decode(prepares: str) -> None:
    """Replay a decode on a backend that prepares its metadata in the graph, as TensorRT-LLM's does, or before it."""
    loaded = one_batch.load("llama", dtype="float32", attention_backend="triton", triton_attention_num_kv_splits=1)
    runner = loaded.model_runner
    one_batch.randomize(runner.model)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    def in_graph(self: Any, forward_batch: Any) -> None:
        names = ("req_pool_indices", "seq_lens", "forward_mode", "spec_info")
        values = {name: getattr(forward_batch, name) for name in names}
        self._apply_cuda_graph_metadata(bs=forward_batch.batch_size, **values)

    if prepares == "in the graph":
        TritonAttnBackend.init_forward_metadata_in_graph = in_graph
    phase = prefill._graph_config(runner).decode
    phase.backend, phase.bs = "full", [2]
    outputs = "sglang.srt.model_executor.graph_shared_output"
    if importlib.util.find_spec(outputs):
        shared: Any = importlib.import_module(outputs)
        runner.graph_shared_output = shared.GraphSharedOutput.create_for_model_runner(runner)
    eager = runner.forward
    with torch.no_grad():
        captured = DecodeCudaGraphRunner(runner)
    captured.device_module = types.SimpleNamespace(Event=Watched)
    steps: list[Any] = []

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            steps.append(
                written_at_once(
                    lambda: captured.execute(batch).next_token_logits.tolist(), runner.req_to_token_pool.req_to_token
                )
            )
        return eager(batch, *args, **kwargs)

    runner.forward = forward

    def act() -> Any:
        steps.clear()
        with torch.no_grad():
            loaded.runner.clear()
            prompts = [numpy.array(prompt, dtype=numpy.int32) for prompt in prefill._prompts([9, 5])]
            requests = loaded.benchmark.prepare_synthetic_inputs_for_latency_test(2, 9, prompts)
            tokens, _, batch = loaded.runner.extend(requests)
            loaded.runner.decode(tokens, batch)
        (found,) = steps
        return found

    telling.with_and_without(act)


if __name__ == "__main__":
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    if sys.argv[1] == "draft":
        draft()
    elif sys.argv[1] == "flashinfer":
        flashinfer()
    else:
        decode(*sys.argv[2:])
