# SPDX-License-Identifier: Apache-2.0
"""Graphs that a release captures for the memory saver, whose memory is then given back and taken again.

    python -m tests.scenarios.released_graph_memory

The capture and the adapter are SGLang's. The memory saver is a stand-in with torch_memory_saver's interface: memory
that was released without a copy comes back as NaN.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from cpu_sglang import graphs, one_batch
from tests.scenarios import telling

TAG = "cuda_graph"


class MemorySaver:
    enabled = True

    def __init__(self) -> None:
        # pool -> whether its memory is copied before it is released
        self.copied: dict[tuple[int, int], bool] = {}
        self.copies: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def cuda_graph(
        self, cuda_graph: Any, pool: Any = None, stream: Any = None, tag: str = "", enable_cpu_backup: bool = False
    ) -> Iterator[None]:
        import torch

        assert tag == TAG
        with torch.cuda.graph(cuda_graph, pool=pool, stream=stream):
            yield
        self.copied[cuda_graph.pool()] = enable_cpu_backup

    def pause(self, tag: str) -> None:
        import torch

        for identity, copied in self.copied.items():
            for block in graphs._pools[identity].blocks:
                memory = torch.empty(0, dtype=torch.uint8).set_(block.storage)
                if copied:
                    self.copies.append((memory, memory.clone()))
                memory.fill_(0xFF)

    def resume(self, tag: str) -> None:
        for memory, copy in self.copies:
            memory.copy_(copy)
        self.copies.clear()


def answers(saver: MemorySaver) -> list[list[float]]:
    """A table is made in the first capture and read by both graphs: before the memory is released, and after."""
    import torch
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    saver.copied.clear()
    table: list[torch.Tensor] = []
    given = torch.tensor([10.0, 20.0])

    def forward() -> torch.Tensor:
        # as code does whose tables must be there for as long as a graph is
        if torch.cuda.is_current_stream_capturing() and not table:
            table.append(torch.full((2,), 3.0))
        return given * (table[0] if table else 3.0)

    replays = captured(forward)
    adapter = TorchMemorySaverAdapter.create(enable=True)
    before = replays[1]()
    adapter.pause(TAG)
    adapter.resume(TAG)
    return [before, replays[1]()]


def captured(forward: Callable[[], Any]) -> list[Callable[[], list[float]]]:
    import torch

    group = SimpleNamespace(barrier=lambda: None)
    runner = SimpleNamespace(device_module=torch.cuda, model_runner=SimpleNamespace(tp_group=group))
    try:
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
    except ModuleNotFoundError:
        return captured_by_an_older_runner(forward)
    backend = FullCudaGraphBackend(runner, enable_memory_saver=True)
    with backend.capture_session(torch.cuda.Stream()):
        for key in (1, 2):
            backend.capture_one(key, forward)
    return [functools.partial(replayed_by, backend, key) for key in (1, 2)]


def captured_by_an_older_runner(forward: Callable[[], Any]) -> list[Callable[[], list[float]]]:
    import torch
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    arguments = SimpleNamespace(enable_memory_saver=True, debug_cuda_graph=False)
    runner = SimpleNamespace(device_module=torch.cuda, model_runner=SimpleNamespace(server_args=arguments))
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    replays: list[Callable[[], list[float]]] = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        output = CudaGraphRunner._capture_graph(runner, graph, pool, stream, forward)
        replays.append(functools.partial(replayed, graph, output))
    return replays


def replayed(graph: Any, output: Any) -> list[float]:
    graph.replay()
    values: list[float] = output.tolist()
    return values


def replayed_by(backend: Any, key: int) -> list[float]:
    values: list[float] = backend.replay(key, None).tolist()
    return values


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    from sglang.srt.utils import torch_memory_saver_adapter as adapter

    saver = MemorySaver()
    adapter.__dict__.update(_memory_saver=saver, import_error=None)
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    telling.with_and_perhaps_without(lambda: answers(saver))


if __name__ == "__main__":
    main()
