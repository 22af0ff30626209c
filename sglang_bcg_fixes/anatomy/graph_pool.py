"""Which tensors of a graph break a replay needs and no CUDA graph keeps; those are kept with the graph.

A graph's memory pool keeps what the graph's own segments made: each replay writes it anew before a break reads it, so
its blocks may be shared with every other graph of the pool. What eager code made, a break or whatever ran before the
capture, lies outside of the pool and has no other owner.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES

# the one place where a break makes views of what it is given and of what it returns
WEAK = "_weak_ref_if_tensor"
WEAK_PLACES = tuple(f"{module}:{WEAK}" for module in DECORATOR_MODULES)
# by graph: the address of a storage, and a tensor that keeps it
_kept: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
_pools: weakref.WeakKeyDictionary[Any, PoolMemory] = weakref.WeakKeyDictionary()
# of ordinary memory, and what SGLang captures with where it names no pool
NO_POOL = (0, 0)


class PoolMemory:
    """Where the allocator has put one graph pool; asked again only for an address that it has not told of.

    Holds for one capture. A pool that graphs use gives nothing back, and memory outside of it that has become the
    pool's would be kept for nothing, never lost.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self.pool = tuple(pool)
        self.begins: list[int] = []
        self.segments: list[tuple[int, bool]] = []

    def holds(self, address: int) -> bool:
        # each segment makes a pool of its own then
        if self.pool == NO_POOL:
            return False
        found = self._look_up(address)
        if found is None:
            self._ask()
            found = self._look_up(address)
        return bool(found)

    def _look_up(self, address: int) -> bool | None:
        at = bisect.bisect_right(self.begins, address) - 1
        if at < 0 or address >= self.segments[at][0]:
            return None
        return self.segments[at][1]

    def _ask(self) -> None:
        import torch

        snapshot: Callable[[], list[dict[str, Any]]] = torch.cuda.memory_snapshot
        found = sorted(snapshot(), key=lambda segment: segment["address"])
        self.begins = [segment["address"] for segment in found]
        self.segments = [
            (segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]) == self.pool)
            for segment in found
        ]


def keep_what_no_pool_keeps(tensor: Any) -> None:
    """For as long as the graph lives that is being captured."""
    capture = graph_break.load("breakable_cuda_graph")._current_capture_var.get()
    if capture is None or tensor.device.type == "xpu" or not tensor.untyped_storage().nbytes():
        return
    address = tensor.untyped_storage().data_ptr()
    kept = _kept.setdefault(capture.cuda_graph, {})
    if address not in kept and not _pools.setdefault(capture, PoolMemory(capture._pool)).holds(address):
        kept[address] = tensor


def keep_and_view(original: Callable[[Any], Any], x: Any) -> Any:
    import torch

    if torch.is_tensor(x):
        keep_what_no_pool_keeps(x)
    return original(x)
