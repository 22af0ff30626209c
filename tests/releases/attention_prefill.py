# SPDX-License-Identifier: Apache-2.0
"""A real release's prefill graphs with attention inside, beside its breaks and eager prefill, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_ATTENTION_EXTEND=fa3 \\
        python -m tests.releases.attention_prefill SCENARIO MODEL [PAGE]

Each batch is answered three times: eagerly, by SGLang's graph, and with the second graphs. SGLang's own functions
prepare and replay it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.process.selfcheck.batches import Batch, OneBatch

BUCKETS = (8, 16)
BATCHES = (
    Batch("full", (16,), 16),
    Batch("padded", (11,), 16),
    Batch("one row of padding", (7,), 8),
    Batch("several", (6, 5), 16),
    Batch("as many as slots", (5, 4, 3), 16),
    Batch("one more", (3, 2, 2, 1), 8),
    Batch("behind a prefix", (9,), 16, prefix=13),
    Batch("full again", (8,), 8),
    Batch("padded again", (10,), 16),
)
Found = dict[str, Any]


class World:
    """A server's model runner, before and after its capture."""

    def __init__(self, model: str, **server_args: Any) -> None:
        one_batch.import_sglang(with_graphs=True)
        one_batch.load_plugins()
        with prefill.built_for_graphs(BUCKETS):
            self.loaded = one_batch.load(model, attention_backend="fa3", **server_args)
        one_batch.randomize(self.loaded.model_runner.model)
        one_batch.derive(self.loaded.model_runner.model)
        self.one = OneBatch(self.loaded.model_runner)

    def capture(self) -> dict[int, int]:
        """Return the breaks of each bucket of SGLang's."""
        runner = prefill.capture_prefill(self.loaded.model_runner, BUCKETS)
        return {size: len(graph._break_fns) for size, graph in prefill.captured_graphs(runner).items()}

    def answer(self, batch: Batch) -> tuple[Any, int]:
        """The logits, and the segments that were replayed for them."""
        self.one.runner.clear()
        segments = 0

        @contextlib.contextmanager
        def counted() -> Iterator[None]:
            nonlocal segments
            before = graphs.counters.replays
            yield
            segments = graphs.counters.replays - before

        logits, _ = self.one.run(batch, seed=3, padded=False, last=counted())
        return logits, segments


def compared(world: World) -> Found:
    eager = [world.answer(batch)[0] for batch in BATCHES]
    breaks = world.capture()
    found: Found = {"breaks": breaks, "batches": {}}
    from sglang_bcg_fixes.kernels.attention_extend import adapter

    served = next(iter(adapter.OPERATION.of_runner.values()), None)
    found["twins"] = (
        [] if served is None else [[twin.rows, twin.bound] for twins in served.twins.values() for twin in twins]
    )
    for batch, expected in zip(BATCHES, eager, strict=True):
        inside, segments = world.answer(batch)
        of_graph, adapter.OPERATION.of_graph = adapter.OPERATION.of_graph, type(adapter.OPERATION.of_graph)()
        broken, broken_segments = world.answer(batch)
        adapter.OPERATION.of_graph = of_graph
        found["batches"][batch.name] = {
            "segments": [segments, broken_segments],
            "same": bool(torch.equal(inside, broken)),
            "as eager": float((inside - expected).abs().max()),
        }
    found["left"] = active.selected("attention_extend").fallbacks
    return found


def main() -> None:
    model = sys.argv[1]
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    print("RESULT", json.dumps(compared(World(model, **options))))


if __name__ == "__main__":
    main()
