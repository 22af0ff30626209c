# SPDX-License-Identifier: Apache-2.0
"""Answers of a release's graph breaks, and the memory kept for them: without the fixes, with them, with worse ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import break_lifetimes as ways
from cpu_sglang import one_batch
from sglang_bcg_fixes.anatomy import graph_pool
from tests.scenarios import named

UNLIKE = {"everything is the pool's": True, "nothing is the pool's": False}


def every_way() -> dict[str, Any]:
    one_batch.import_sglang(with_graphs=True)
    vars(ways).update(SIZES=(16, 8, 4), WIDTH=4)
    ways.breakable()
    found: dict[str, Any] = {"stock": observe()}
    from sglang_bcg_fixes import plugin

    process = plugin.load()
    applied = process.report.ids("applied")
    found |= {"applied": applied, "fixed": observe(), "without a pool": observe_without_a_pool(), "unlike": {}}
    for name, answer in UNLIKE.items():
        with replaced(graph_pool.PoolMemory, "holds", lambda self, address, answer=answer: answer):
            found["unlike"][name] = observe()
    found["read back"] = {fix: process.ledger.read_back(fix) for fix in applied}
    for fix in reversed(applied):
        process.ledger.undo(fix)
    return {**found, "undone": observe()}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Put a value in its place, and back what was there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


class Counted:
    """Counts what is kept for each graph while it is there: a graph that has gone lets go of it."""

    def __init__(self) -> None:
        self.most = 0
        self.keep = graph_pool.keep_what_no_pool_keeps

    def __call__(self, tensor: torch.Tensor) -> None:
        self.keep(tensor)
        self.most = max(self.most, sum(map(len, graph_pool._kept.values())))


def observe() -> dict[str, tuple[str, int]]:
    """Give for each way the answer, and the largest number of tensors that were kept at a time."""
    graph_pool._kept.clear()
    found = {}
    for way in ways.WAYS:
        counted = Counted()
        with replaced(graph_pool, "keep_what_no_pool_keeps", counted):
            answer, _, _ = ways.observe(way, "cpu").partition(",")
        found[way] = (answer, counted.most)
    return found


def observe_without_a_pool() -> dict[str, str]:
    """Capture as SGLang does its first decode graphs to 0.5.13; ordinary memory has the number that stands for none."""
    pools: Callable[[], list[dict[str, Any]]] = torch.cuda.memory_snapshot

    def snapshot(*_: Any) -> list[dict[str, Any]]:
        told = sorted(pools(), key=lambda segment: segment["address"])
        edges = [(segment["address"], segment["address"] + segment["total_size"]) for segment in told]
        gaps = zip([0, *(end for _, end in edges)], [*(begin for begin, _ in edges), 2**63], strict=True)
        told += [{"address": begin, "total_size": end - begin, "segment_pool_id": (0, 0)} for begin, end in gaps]
        return told

    with replaced(torch.cuda, "memory_snapshot", snapshot), replaced(torch.cuda, "graph_pool_handle", lambda: None):
        return {way: answer for way, (answer, _) in observe().items()}


if __name__ == "__main__":
    named.run(globals())
