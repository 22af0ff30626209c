# SPDX-License-Identifier: Apache-2.0
"""Keep the tensors of a graph break that a replay needs and that no CUDA graph owns.

A graph's memory pool keeps what the graph's own segments made: each replay rewrites it before a break reads it, so its
blocks may be shared with every other graph of the pool. Tensors made by eager code, in a break or before the capture,
lie outside the pool and have no other owner.
"""

from __future__ import annotations

import bisect
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.engine.graph_break import DECORATOR_MODULES

logger = logging.getLogger("sglang_bcg_fixes")

# the one place where a break makes views of its inputs and outputs
WEAK = "_weak_ref_if_tensor"
WEAK_PLACES = tuple(f"{module}:{WEAK}" for module in DECORATOR_MODULES)
# for each graph: the address of a storage, and a tensor that keeps it alive
_kept: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
_pools: weakref.WeakKeyDictionary[Any, PoolMemory] = weakref.WeakKeyDictionary()
# pool id of ordinary memory, also used by SGLang's captures that name no pool
NO_POOL = (0, 0)


@functools.cache
def say_that_nothing_is_kept(why: str) -> None:
    logger.warning(
        "bcg-fixes: break_input_lifetime keeps nothing: the allocator does not tell which memory is a graph's: %s", why
    )


class PoolMemory:
    """Address ranges of one graph pool; asks the allocator again only for an unknown address.

    Valid for one capture. A pool that graphs use gives nothing back, and outside memory that has since become the
    pool's would be kept needlessly, never lost.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self.pool = tuple(pool)
        self.begins: list[int] = []
        self.segments: list[tuple[int, bool]] = []

    def holds(self, address: int) -> bool:
        # each segment then makes its own pool
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
        try:
            found = sorted(snapshot(), key=lambda segment: segment["address"])
        except RuntimeError as error:
            # of PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync; what a capture keeps is left to SGLang
            say_that_nothing_is_kept(str(error))
            self.begins, self.segments = [0], [(sys.maxsize, True)]
            return
        self.begins = [segment["address"] for segment in found]
        self.segments = [
            (segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]) == self.pool)
            for segment in found
        ]


def keep_what_no_pool_keeps(tensor: Any) -> None:
    """Keep a tensor outside the pool for the lifetime of the graph being captured."""
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
