# SPDX-License-Identifier: Apache-2.0
"""A prefix that arrives from the host while prefill graphs run, each layer only when it is waited for.

A release's real prefill runner, its pool of keys and values and its counter of loaded layers. Where graphs have no
breaks, other layers stand in place of a small model's own. They read the prefix as attention does, from the buffers
that the pool gives them. So do those that stand for DeepSeek-V4's compressors, in graphs that could have breaks.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from cpu_sglang import graphs, prefill
from tests.releases import kinds_of_request
from tests.scenarios import released, telling

BUCKETS, REQUESTS = (8, 16), 2
PREFIX = slice(1, 5)
NOT_THERE = -1.0
PARTS = ("multi_process_adapter", "sglang_adapter", "utils")


class Arriving:
    """The events of one load: the wait for a layer brings it and those before it, as the host's stream does."""

    def __init__(self, layers: int) -> None:
        self.buffers: list[torch.Tensor] = []
        self.waited: list[int] = []

    def start(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.waited = buffers, []
        for buffer in buffers:
            buffer[PREFIX] = NOT_THERE

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        for index, buffer in enumerate(self.buffers[: layer + 1]):
            buffer[PREFIX] = 1.0 + index


class Connector:
    """LMCache's: one layer has arrived, and the next one does when this one is waited for."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.waited: list[int] = []
        self.arrived = 0

    def start(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.waited, self.arrived = buffers, [], len(buffers)
        for buffer in buffers:
            buffer[PREFIX] = NOT_THERE

    def load(self, consumer: int) -> None:
        if consumer >= 0:
            self.buffers[0][PREFIX], self.arrived = 1.0, 1

    def load_kv_layerwise(self, layer: int) -> None:
        self.waited.append(layer)
        if layer + 1 == self.arrived < len(self.buffers):
            self.buffers[self.arrived][PREFIX] = 1.0 + self.arrived
            self.arrived += 1


def of_lmcache(layers: int) -> Any:
    """Return SGLang's counter for LMCache, of which only the connector's place is asked for."""
    for name in ("", ".integration", ".integration.sglang", *(f".integration.sglang.{part}" for part in PARTS)):
        sys.modules[f"lmcache{name}"] = mock.MagicMock()
    from sglang.srt.mem_cache.storage.lmcache import lmc_radix_cache

    connector = Connector()
    # a stand-in of a stream has no device
    vars(lmc_radix_cache)["device_stream_context"] = lambda stream: contextlib.nullcontext()
    counter = lmc_radix_cache.LayerTransferCounter(layers, graphs.Stream(), connector)
    counter.events, counter.set_consumer = [connector], connector.load
    return counter


class Layers(torch.nn.Module):
    """The layers of a model, which look at a prefix of four slots and at nothing else."""

    def __init__(self, model_runner: Any, waits: bool) -> None:
        super().__init__()
        layers = model_runner.model.model
        self.layers, self.embeddings = layers.layers, layers.embed_tokens
        self.pool = model_runner.token_to_kv_pool
        if waits:
            self.pool.wait_layer_transfer = types.MethodType(of_deepseek_v4(), self.pool)

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
        hidden = self.embeddings(input_ids)
        for layer in range(len(self.layers)):
            hidden = hidden * 2 + self.pool.get_key_buffer(layer)[PREFIX].float().mean()
        return hidden


def of_deepseek_v4() -> Callable[..., None]:
    """Return how a pool of DeepSeek-V4 waits, which its compressors do within a segment."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    wait: Callable[..., None] = DeepSeekV4TokenToKVPool.wait_layer_transfer
    return wait


def main(graph: str) -> None:
    loaded = released.load("llama", dtype="float32", max_running_requests=REQUESTS)
    runner = loaded.model_runner
    from sglang.srt.managers import cache_controller

    cache_controller.LayerLoadingEvent = Arriving
    pool = runner.token_to_kv_pool
    buffers = [pool.get_key_buffer(layer) for layer in range(pool.layer_num)]
    counts = of_lmcache if graph == "lmcache" else cache_controller.LayerDoneCounter
    counter = counts(len(buffers))
    if graph != "breakable":
        runner.model.model = Layers(runner, waits=graph == "compressors")

    def answer(consumer: int) -> tuple[list[int], Any]:
        """The layers that a batch waits for, and its answer."""
        for events in counter.events:
            events.start(buffers)
        counter.set_consumer(consumer)
        logits = kinds_of_request.run(loaded, [5, 6], kinds_of_request.as_it_is)["next_token_logits"]
        return [layer for events in counter.events for layer in events.waited], logits

    pool.register_layer_transfer_counter(counter)
    eager = {consumer: answer(consumer)[1] for consumer in (0, 2, -1)}
    # as at a server's start: it makes the counter after the graphs
    pool.register_layer_transfer_counter(None)
    if graph in ("whole", "lmcache"):
        prefill.capture_prefill_whole(runner, BUCKETS, REQUESTS)
    else:
        prefill.capture_prefill(runner, BUCKETS)
    pool.register_layer_transfer_counter(counter)

    def act() -> dict[str, Any]:
        found = {}
        for consumer in eager:
            before = graphs.counters.replays
            waited, logits = answer(consumer)
            assert graphs.counters.replays > before
            found[str(consumer)] = {"waited for": waited, "right": torch.equal(logits, eager[consumer])}
        return found

    telling.with_and_without(act, layers=len(buffers))


if __name__ == "__main__":
    main(*sys.argv[1:])
