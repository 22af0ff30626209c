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
from tests.scenarios import sparse_attention, telling

STEP = draft_extend.Step(prefix=(20, 5), new=(draft_extend.NEW_TOKENS,) * 2, seq_lens=(24, 9))


class Watched(graphs.Event):
    """An event that counts how often events are recorded, and acts at the last time."""

    records = 0
    last = 0
    act: Callable[[], object]

    def record(self, stream: graphs.Stream | None = None) -> None:
        super().record(stream)
        Watched.reached()

    @classmethod
    def reached(cls) -> None:
        Watched.records += 1
        if Watched.records == Watched.last:
            Watched.act()


class Marker(Watched):
    """Such an event inside a graph, where each replay records it."""

    def record(self, stream: graphs.Stream | None = None) -> None:
        graphs.Event.record(self, stream)
        reached_in_graph()


@graphs.opaque
def reached_in_graph() -> None:
    Watched.reached()


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


def sparse_backend(runner: Any) -> Any:
    """MiniMax's backend with its own decode, around a kernel in plain torch that reads the table it is given."""
    from sglang.srt.layers.attention import minimax_sparse_backend as module

    def attend(q: torch.Tensor, *given: Any, **_: Any) -> Any:
        _, _, values, index, _, _, _, table, rows, lengths = given[:10]
        slots = table[rows]
        seen = (torch.arange(slots.shape[1]) < lengths[:, None])[..., None, None]
        mean = (values[slots * seen[..., 0, 0]].float() * seen).sum(1) / lengths[:, None, None]
        return index, mean.repeat_interleave(q[0].numel() // mean[0].numel(), 1).to(q.dtype)

    class Sparse(module.MiniMaxSparseAttnBackend):
        def __init__(self) -> None:
            pool = runner.token_to_kv_pool
            self.req_to_token = runner.req_to_token_pool.req_to_token
            self.kv_pool = types.SimpleNamespace(
                set_fused_kv_index_buffer=lambda layer, loc, k, v, *_: pool.set_kv_buffer(layer, loc, k, v),
                get_kv_buffer=pool.get_kv_buffer,
                get_index_kv_buffer=lambda layer: (None, None),
            )
            self.disable_value_layer_ids: set[int] = set()
            self.use_dense_sparse_decode = self._use_msa_decode = self.is_npu = False
            self.fp8_attn_gemm = self.index_cache_enabled = False
            self._max_seqlen_k = self.block_size_k = self.topk_blocks = self.init_blocks = self.local_blocks = 1
            self.page_size = self.score_type = self.speculative_num_draft_tokens = 1
            self.hisparse_coordinator = self.indexer_cp = None

        def init_forward_metadata(self, forward_batch: Any) -> None: ...

        init_forward_metadata_in_graph = init_forward_metadata

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

        def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *_: Any, idx_q: Any, **__: Any) -> Any:
            return idx_q.flatten(1), self.dense_backend.forward_extend(q, k, v, layer, batch)

    # later releases import it where it is called
    places: list[Any] = [
        module,
        importlib.import_module("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"),
    ]
    for place in places:
        if hasattr(place, "minimax_sparse_decode"):
            place.minimax_sparse_decode = attend
    for layer in runner.model.model.layers:
        layer.self_attn.attn = sparse_attention.Sparse(layer.self_attn.attn)
        # as MiniMax's model calculates them
        for name in ("q_scale", "k_scale", "v_scale", "idx_q_scale", "idx_k_scale", "idx_v_scale"):
            setattr(layer.self_attn.attn.inner, f"{name}_float", 1.0)
    layers = range(len(runner.model.model.layers))
    return module.MiniMaxHybridAttnBackend(runner.attn_backend, Sparse(), list(layers))


def mark_graphs() -> None:
    """Record an event in a graph where SGLang does on CUDA: the stand-in of an event is none for graphs."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    if hasattr(module, "make_external_event"):
        module.make_external_event = lambda device_module: Marker()


def decode(prepares: str) -> None:
    """Replay a decode on a backend that prepares its metadata in the graph, as TensorRT-LLM's does, or before it.

    MiniMax's prepares nothing: each layer reads the table.
    """
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
    if prepares == "nothing":
        runner.attn_backend = sparse_backend(runner)
    mark_graphs()
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


def of_deepseek() -> dict[str, Any]:
    """Give DeepSeek-V4's backend with each kind of indexer, in releases that have V4.1's."""
    if not importlib.util.find_spec("sglang.srt.layers.attention.dsv4.v41_indexer"):
        return {}
    module: Any = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")
    kinds = {"no low ratios": ((), False), "in torch": ((2,), False), "by DeepGEMM": ((2,), True)}
    made = {}
    for name, (ratios, by_deep_gemm) in kinds.items():
        made[name] = backend = object.__new__(module.DeepseekV4AttnBackend)
        backend.low_ratios, backend.forward_metadata = ratios, None
        backend.model_runner = types.SimpleNamespace(spec_algorithm=types.SimpleNamespace(is_dspark=lambda: False))
        backend.full_topk_indexer = module.make_full_topk_indexer(token_to_kv_pool=None, req_to_token=None)
        backend.full_topk_indexer.use_deep_gemm_decode = by_deep_gemm
    return made


def declared() -> None:
    """List the end of reads that each attention backend declares for a decode, a verification and a prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    modules = ("minimax_sparse_backend", "minimax_sparse_nvfp4_backend", "qwen_sparse_attn_backend", "triton_backend")
    found: dict[str, Any] = {}
    for name in modules:
        if importlib.util.find_spec(f"sglang.srt.layers.attention.{name}"):
            module = importlib.import_module(f"sglang.srt.layers.attention.{name}")
            found |= {
                key: kind for key, kind in vars(module).items() if getattr(kind, "__module__", "") == module.__name__
            }
    backends: dict[str, Any] = {
        name: object.__new__(kind) for name, kind in found.items() if hasattr(kind, "shared_read_ends")
    }
    backends |= {f"DeepSeek-V4, {name}": backend for name, backend in of_deepseek().items()}
    backends["MiniMaxHybridAttnBackend"].dense = backends["TritonAttnBackend"]
    backends["MiniMaxHybridAttnBackend"].sparse = backends["MiniMaxSparseAttnBackend"]
    modes = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND)
    telling.with_and_without(
        lambda: {name: [backend.shared_read_ends(mode).name for mode in modes] for name, backend in backends.items()}
    )


if __name__ == "__main__":
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    if sys.argv[1] == "draft":
        draft()
    elif sys.argv[1] == "declared":
        declared()
    elif sys.argv[1] == "flashinfer":
        flashinfer()
    else:
        decode(*sys.argv[2:])
