# SPDX-License-Identifier: Apache-2.0
"""A real release's prefill graphs with attention inside, beside its breaks and eager prefill, on the CPU.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 SGLANG_BCG_KERNEL_ATTENTION_EXTEND=fa3 \\
        python -m tests.releases.attention_prefill SCENARIO MODEL [SERVER_ARGS]

Each batch is answered three times: eagerly, by SGLang's graph, and with the second graphs. SGLang's own functions
prepare and replay it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.attention_extend import adapter, fa3, trial
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
# where each takes long, and where many are run
BRIEF = tuple(batch for batch in BATCHES if batch.name in ("padded", "several"))
MISTAKEN = tuple(
    batch
    for batch in BATCHES
    if batch.name in ("padded", "one row of padding", "several", "one more", "behind a prefix")
)
# no answer shows it, as no token attends to padding: the trial does, and is right in all others
PADDING = "forgets the slot of the padding"
MUTANTS = {
    "forgets the lengths": ("[metadata.cache_seqlens_int32, metadata", "[self.lengths[:requests], metadata"),
    "forgets the pages": (".copy_(metadata.page_table)", ""),
    "fills the tables once": (
        "self.tables.fill(metadata, twin.rows)",
        "vars(self).get('once') or vars(self).update(once=self.tables.fill(metadata, twin.rows) or True)",
    ),
    "files a twin under another bucket": (
        "self.twins[stored(place, size, kept)[0]]",
        "self.twins[next(iter(self.twins), stored(place, size, kept)[0])]",
    ),
    "leaves its graph for SGLang's": ("        place._graphs[size], place._outputs[size] = first\n", "        pass\n"),
    "copies no answer": ("copies or [])", "[])"),
    "forgets the window's pages": (".copy_(metadata.swa_page_table)", ""),
    "forgets the window's slots": (".copy_(slots)", ""),
    # last, as the trial is no other one afterwards
    PADDING: ("            empty[REQUESTS + 2 :] = rows\n", ""),
}


class World:
    """A server's model runner, before and after its capture."""

    def __init__(self, model: str, **server_args: Any) -> None:
        one_batch.import_sglang(with_graphs=True)
        one_batch.load_plugins()
        with prefill.built_for_graphs(BUCKETS):
            self.loaded = one_batch.load(model, **{"attention_backend": "fa3", **server_args})
        one_batch.randomize(self.loaded.model_runner.model)
        one_batch.derive(self.loaded.model_runner.model)
        self.one = OneBatch(self.loaded.model_runner)
        # the graphs that have ended
        self.ended: list[int] = []

    def capture(self) -> dict[int, int]:
        """Return the breaks of each bucket of SGLang's."""
        kind = graph_break.load("breakable_cuda_graph").BreakableCUDAGraph
        begin = kind.__init__

        def counted(graph: Any, *positional: Any, **named: Any) -> None:
            begin(graph, *positional, **named)
            weakref.finalize(graph, self.ended.append, 1)

        with mock.patch.object(kind, "__init__", counted):
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


def measured(world: World, batches: Sequence[Batch], eager: list[Any]) -> Found:
    """Capture, and compare each batch with its eager answer."""
    breaks = world.capture()
    gc.collect()
    found: Found = {"breaks": breaks, "batches": {}, "ended": len(world.ended)}
    served = next(iter(adapter.OPERATION.of_runner.values()), None)
    found["twins"] = (
        [] if served is None else [[twin.rows, twin.bound] for twins in served.twins.values() for twin in twins]
    )
    for batch, expected in zip(batches, eager, strict=True):
        inside, segments = world.answer(batch)
        of_graph, adapter.OPERATION.of_graph = adapter.OPERATION.of_graph, type(adapter.OPERATION.of_graph)()
        broken, broken_segments = world.answer(batch)
        adapter.OPERATION.of_graph = of_graph
        found["batches"][batch.name] = {
            "segments": [segments, broken_segments],
            "same": bool(torch.equal(inside, broken)),
            "as eager": float((inside - expected).abs().max()),
        }
    fallbacks = active.selected("attention_extend").fallbacks
    found["left"] = dict(fallbacks)
    fallbacks.clear()
    return found


def right(model: str, batches: Sequence[Batch] = BATCHES, **server_args: Any) -> Found:
    world = World(model, **server_args)
    return measured(world, batches, [world.answer(batch)[0] for batch in batches])


def brief(model: str, **server_args: Any) -> Found:
    return right(model, BRIEF, **server_args)


class Counter:
    """A cache that has asked to be told of each layer, and loads it only then."""

    consumer_index = -1

    def __init__(self) -> None:
        self.layers = 0

    def wait_until(self, layer: int) -> None:
        self.layers += 1


def others(model: str, **server_args: Any) -> Found:
    """Tell what is replayed for a cache that loads layers, and with another backend than the captured one."""
    world = World(model, **server_args)
    world.capture()
    model_runner, batch = world.loaded.model_runner, Batch("behind a prefix", (9,), 16, prefix=13)
    pool, backend = model_runner.token_to_kv_pool, model_runner.attn_backend
    found: Found = {"before": world.answer(batch)[1]}
    counter = Counter()
    pool.register_layer_transfer_counter(counter)
    found["loaded by layer"] = [world.answer(batch)[1], counter.layers]
    pool.layer_transfer_counter = None
    # as adaptive speculation does; the first one still has the metadata of a batch of the same lengths
    model_runner.attn_backend = model_runner._get_attention_backend()
    found["another backend"] = world.answer(batch)[1]
    model_runner.attn_backend = backend
    found["afterwards"] = world.answer(batch)[1]
    found["left"] = dict(active.selected("attention_extend").fallbacks)
    return found


def mutants(model: str, **server_args: Any) -> Found:
    """Report each mistake; "none" is without one."""
    world = World(model, **server_args)
    eager = [world.answer(batch)[0] for batch in MISTAKEN]
    # a module builds on those before it
    texts = {module: pathlib.Path(str(module.__file__)).read_text() for module in (fa3, trial, adapter)}
    found: Found = {}
    for name, (old, new) in {"none": ("", ""), **MUTANTS}.items():
        assert any(old in text for text in texts.values()), name
        for module, text in texts.items():
            if module is not trial or name == PADDING:
                exec(compile(text.replace(old, new), str(module.__file__), "exec"), vars(module))
        try:
            found[name] = measured(world, MISTAKEN, eager)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(scenario: str, model: str, server_args: str = "{}") -> None:
    print("RESULT", json.dumps(globals()[scenario](model, **json.loads(server_args))))


if __name__ == "__main__":
    main(*sys.argv[1:])
