# SPDX-License-Identifier: Apache-2.0
"""Prefill graphs without breaks on FlashAttention: each batch beside eager prefill."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from cpu_sglang import architectures, graphs, one_batch, prefill
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.process.selfcheck.batches import Batch, OneBatch
from tests.scenarios import named

CHUNK = 8
LLAMA_4 = "Llama4ForConditionalGeneration"
# slots of a window pool that somebody else has
TAKEN = 7
NAIVE = "set_mla_kv_buffer_naive"
LOCAL_BATCHES = (
    Batch("within", (6,), 8),
    Batch("of the chunk", (8,), 8),
    Batch("two of the chunk", (8, 8), 16),
    Batch("within behind a prefix", (4,), 4, prefix=4),
    Batch("beyond", (13,), 16),
    Batch("one of two beyond", (4, 9), 16),
    Batch("beyond behind a prefix", (8,), 8, prefix=8),
)
# the CPU's experts take no padded rows
WINDOW_BATCHES = tuple(batch for batch in LOCAL_BATCHES if not batch.padding)
# none is padded: the CPU's experts do not take padded rows
LATENT_BATCHES = (
    Batch("no prefix", (16,), 16),
    Batch("two without", (9, 7), 16),
    Batch("as long a prefix", (8,), 8, prefix=8),
    Batch("a longer prefix", (8,), 8, prefix=24),
    Batch("a shorter prefix", (8,), 8, prefix=4),
)


def chunks() -> dict[str, Any]:
    """A Llama whose layers all attend locally, as three of four of Llama 4's do."""
    begin()
    from sglang.srt.configs import model_config
    from sglang.srt.layers.radix_attention import RadixAttention

    override = json.dumps({"attention_chunk_size": CHUNK})
    with mock.patch.object(model_config, "is_local_attention_model", lambda _: True):
        loaded = load("llama", json_model_override_args=override)
    for layer in loaded.model_runner.model.modules():
        if isinstance(layer, RadixAttention):
            layer.use_irope = True
    return compared(loaded, LOCAL_BATCHES)


def chunks_in_their_own_pool() -> dict[str, Any]:
    """Llama 4, three of whose four layers attend locally."""
    begin()
    config = architectures.CONFIGURATIONS[LLAMA_4].config
    text = {**config["text_config"], "attention_chunk_size": CHUNK, "num_hidden_layers": 4}
    with tempfile.TemporaryDirectory() as folder:
        whole = {**config, "architectures": [LLAMA_4], "text_config": text}
        pathlib.Path(folder, "config.json").write_text(json.dumps(whole))
        loaded = load(folder, dtype="bfloat16")
    take_slots(loaded)
    return compared(loaded, LOCAL_BATCHES)


def windows_in_their_own_pool() -> dict[str, Any]:
    """GPT-OSS, one of whose two layers has a sliding window."""
    begin()
    loaded = load("gpt_oss", dtype="bfloat16")
    take_slots(loaded)
    return compared(loaded, WINDOW_BATCHES)


def take_slots(loaded: one_batch.LoadedModel) -> None:
    """Give no token the same slot in both pools."""
    allocator = loaded.model_runner.token_to_kv_pool_allocator
    clear = allocator.clear

    def clear_and_take() -> None:
        clear()
        allocator.swa_attn_allocator.alloc(TAKEN)

    allocator.clear = clear_and_take


def latent_prefixes() -> dict[str, Any]:
    """A small DeepSeek."""
    begin()
    # the prefix cache decides whether prefixes are captured
    loaded = load("deepseek_v2", chunked_prefill_size=16, disable_radix_cache=False)
    one_batch.derive(loaded.model_runner.model)
    return compared(loaded, LATENT_BATCHES)


def hybrid(model: str) -> str:
    """The end of a hybrid model's capture."""
    begin()
    loaded = load(model)
    try:
        capture(loaded)
    except IndexError as error:
        return str(error)
    return "captured"


def begin() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    # of the newest releases: it looks at the slots, as no kernel for a GPU does
    module = "sglang.kernels.ops.kvcache.mla_buffer"
    buffers: Any = importlib.import_module(module) if importlib.util.find_spec("sglang.kernels") else None
    if hasattr(buffers, NAIVE):
        setattr(buffers, NAIVE, graphs.opaque(getattr(buffers, NAIVE)))


def load(model: str, **options: Any) -> one_batch.LoadedModel:
    with prefill.built_for_graphs():
        loaded = one_batch.load(model, attention_backend="fa3", **options)
    one_batch.randomize(loaded.model_runner.model)
    return loaded


def compared(loaded: one_batch.LoadedModel, batches: Sequence[Batch]) -> dict[str, Any]:
    """Name each batch, whether it was replayed, and whether it is right."""
    one = OneBatch(loaded.model_runner)
    eager = [answer(one, batch)[0] for batch in batches]
    capture(loaded)
    found = {}
    for batch, expected in zip(batches, eager, strict=True):
        logits, replays = answer(one, batch)
        found[batch.name] = [replays, bool((logits - expected).abs().max() < 1e-2)]
    return {"applied": plugin.load().ledger.applied(), "found": found}


def capture(loaded: one_batch.LoadedModel) -> None:
    phase = prefill._graph_config(loaded.model_runner).prefill
    phase.backend, phase.bs, phase.full_prefill_max_req = "full", [4, *prefill.BUCKETS], 2
    loaded.model_runner.init_prefill_cuda_graph()


def answer(one: OneBatch, batch: Batch) -> tuple[Any, int]:
    """The logits, and whether the batch itself was replayed, not what comes before it."""
    one.runner.clear()
    replays = [0]

    @contextlib.contextmanager
    def counted() -> Any:
        before = graphs.counters.replays
        yield
        replays[0] = graphs.counters.replays - before

    with torch.no_grad():
        logits, _ = one.run(batch, 1, False, counted())
    return logits, replays[0]


if __name__ == "__main__":
    named.run(globals())
