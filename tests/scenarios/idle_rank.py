# SPDX-License-Identifier: Apache-2.0
"""Two real ranks with data parallel attention, one of them idle, and Qwen4's n-gram embeddings in a small model.

With the argument `busy` both have requests.
The runner, the breaks and the collectives are SGLang's, and so is the layer that embeds; the model round it is a tiny
Qwen3. As on a GPU, a kernel that is launched without blocks fails.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

import torch

from cpu_sglang import graphs, one_batch, prefill, ranks
from sglang_bcg_fixes.engine import graph_break
from tests.scenarios import data_parallel, telling

MODULE = "sglang.srt.models.qwen4_exp"
PROMPTS = ([11], [5])
EOS, NGRAM = 2, 3
CONFIG: dict[str, Any] = {
    # two streams of half the size of the model round it
    "hidden_size": 32,
    "hc_count": 2,
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 3,
    "ple_embedding_dtype": "bfloat16",
    "ple_offload_embedding": False,
    "ngram_size": NGRAM,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 16,
    "heads_per_ngram": 2,
    "vocab_size": 128,
    "eos_token_id": EOS,
    "rms_norm_eps": 1e-6,
}


class Embedding(torch.nn.Module):
    """The model's own embeddings with Qwen4's added to them, eagerly and in breaks as Qwen4 has them."""

    def __init__(self, inner: torch.nn.Module, module: Any) -> None:
        super().__init__()
        self.inner, self.module, self.batch = inner, module, None
        torch.manual_seed(1)
        self.added = module.Qwen4ExpPLELayer(types.SimpleNamespace(**CONFIG), layer_id=0)
        for parameter in self.added.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape)
        self.added.to(torch.bfloat16)

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.inner(input_ids)
        sizes = {"ngram_size": NGRAM, "ngram_eos_token_id": EOS}
        if graph_break.load("context").is_in_breakable_cuda_graph():
            return self.in_breaks(input_ids, hidden, sizes)
        batch = self.module._prepare_ple_batch(input_ids=input_ids, forward_batch=self.batch, **sizes)
        if batch is None:
            self.added.forward_idle(self.batch)
            return hidden
        return hidden + self.added(hidden_states=hidden, forward_batch=self.batch, batch=batch)

    def in_breaks(self, input_ids: torch.Tensor, hidden: torch.Tensor, sizes: dict[str, int]) -> Any:
        prepare, embed = self.module._breakable_prepare_ple_batch, self.module._breakable_ple_forward
        if "holder" not in inspect.signature(prepare).parameters:
            return hidden + embed(self.added, hidden, prepare(input_ids=input_ids, **sizes))
        holder, output = self.module._BreakablePLEBatch(), torch.empty_like(hidden)
        prepare(input_ids=input_ids, holder=holder, **sizes)
        embed(self.added, hidden, holder, output)
        return output


def install(loaded: one_batch.LoadedModel) -> list[int]:
    """Put the embeddings into the model; return the list of rows that its norms will have been given."""
    module: Any = importlib.import_module(MODULE)
    pool, layers = loaded.model_runner.req_to_token_pool, loaded.model_runner.model.model
    history = torch.full((64, NGRAM - 1), EOS)
    embedding = Embedding(layers.embed_tokens, module)
    state = torch.zeros(64, embedding.added.conv_channels, embedding.added.short_conv_state_len)
    pool.get_mamba_indices = lambda requests: requests
    pool.get_ngram_context = history.__getitem__
    pool.short_conv_layer_cache = lambda layer: state.zero_()
    normed: list[int] = []
    norm, run_layers = module.Qwen4ExpPLEGroupedNorm.forward, layers.forward

    def launch(self: Any, rows: torch.Tensor) -> Any:
        normed.append(len(rows))
        if not len(rows):
            raise RuntimeError("CUDA error: invalid configuration argument")
        return norm(self, rows)

    def forward(input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        embedding.batch = forward_batch
        return run_layers(input_ids, positions, forward_batch, *rest, **named)

    module.Qwen4ExpPLEGroupedNorm.forward = launch
    layers.forward, layers.embed_tokens = forward, embedding
    return normed


def idle(loaded: one_batch.LoadedModel) -> None:
    """One step of a rank that has no request."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components import dp_attn
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.utils import require_mlp_tp_gather

    runner = loaded.model_runner

    def nothing() -> Any:
        batch = ScheduleBatch.init_new(
            reqs=[],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=None,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_idle()
        return batch

    batch = dp_attn.prepare_mlp_sync_batch_raw(
        None,
        model_runner=runner,
        get_idle_batch=nothing,
        disable_cuda_graph=False,
        require_mlp_tp_gather=require_mlp_tp_gather(),
        disable_overlap_schedule=True,
        offload_tags=set(),
    )
    with torch.no_grad():
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        runner.sample(runner.forward(forward_batch).logits_output, forward_batch)


def step(loaded: one_batch.LoadedModel, rank: ranks.Rank, lengths: list[int]) -> Any:
    """The logits of a rank that has requests."""
    if rank.number and "busy" not in sys.argv:
        return idle(loaded)
    return one_batch.generate(loaded, prefill._prompts(lengths), 1)[1]


def serve(rank: ranks.Rank) -> dict[str, Any]:
    loaded = data_parallel.load(rank, "Qwen3ForCausalLM", dtype="bfloat16")
    normed = install(loaded)
    eager = [step(loaded, rank, lengths) for lengths in PROMPTS]
    prefill.capture_prefill(loaded.model_runner, [8, 16])
    normed.clear()
    before = graphs.counters.replays
    found = [step(loaded, rank, lengths) for lengths in PROMPTS]
    right = [bool((one == other).all()) for one, other in zip(found, eager, strict=True) if one is not None]
    return {"replayed": graphs.counters.replays > before, "normed": normed, "right": right}


def main() -> None:
    data_parallel.prepare()
    # the fix waits for it
    importlib.import_module(MODULE)
    telling.with_and_without(lambda: ranks.each(2, serve))


if __name__ == "__main__":
    main()
