# SPDX-License-Identifier: Apache-2.0
"""Into how many parts FlashAttention-3 splits the keys of a request: the order of its sums, and so the bits of it.

The host chooses an upper bound from the shape of the launch alone. The device then gives each request as many parts as
its multiprocessors can take. An eager launch is as large as its batch, a captured one as its bucket and the context:
they may differ in the bound, never in what the device chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import math

MOST = 128
# of the multiprocessors: with as many blocks nothing is split
BUSY = 0.8
# more parts are taken only if they are better by this much
NEARLY_BEST = 0.85
# with fewer blocks of keys nothing is split
FEW_BLOCKS = 4
# the device leaves itself a tenth more of work
MARGIN = 1.1
# with smaller heads, and with several requests, the rule does not tell the parts of a split launch: measured on an H200
LEAST_SIZE = 128
# of a product of fp32 numbers, which rounds as it likes
DOUBT = 1e-4


@dataclasses.dataclass(frozen=True)
class Heads:
    """A kind of attention layer; no window is -1."""

    queries: int
    keys: int
    size: int
    window: int = -1

    @property
    def group(self) -> int:
        return self.queries // self.keys


def tile(heads: Heads, is_local: bool) -> tuple[int, int]:
    """Rows and keys of a block, for pages that are not read by TMA and values of two bytes."""
    if heads.size <= 96:
        return 192, 128
    if heads.size <= 128:
        return 128, 128
    if heads.size <= 192:
        return 128, 96
    return 128, 64 if is_local else 80


@functools.lru_cache(maxsize=4096)
def bound(heads: Heads, rows: int, keys: int, multiprocessors: int) -> int:
    """Return the most parts of a launch whose longest request has as many rows, with a table for as many keys."""
    is_local = 0 <= heads.window < keys - 1
    block_rows, block_keys = tile(heads, is_local)
    loaded = min(keys, heads.window + 1 + block_rows) if is_local else keys
    blocks_of_keys = -(-loaded // block_keys)
    blocks = heads.keys * -(-rows * heads.group // block_rows)
    if blocks >= BUSY * multiprocessors or blocks_of_keys <= FEW_BLOCKS:
        return 1
    most = min(MOST, multiprocessors, blocks_of_keys)
    waves = [blocks * parts / multiprocessors for parts in range(1, most + 1)]
    filled = [wave / math.ceil(wave) for wave in waves]
    enough = NEARLY_BEST * max(filled)
    return next(parts for parts, share in enumerate(filled, 1) if share >= enough)


def wanted(heads: Heads, requests: tuple[tuple[int, int], ...], table: int, multiprocessors: int) -> list[set[int]]:
    """Return for each request the parts that the device may choose without a bound.

    A request is its new tokens and its keys. `table` tells whether a window is shorter than the table.
    """
    block_rows, block_keys = tile(heads, 0 <= heads.window < table - 1)
    blocks = [(-(-rows * heads.group // block_rows), -(-keys // block_keys)) for rows, keys in requests]
    work = sum(rows * keys for rows, keys in blocks) * MARGIN * heads.keys / multiprocessors
    each = {max(1, math.ceil(work + doubt)) for doubt in (-DOUBT, DOUBT)}
    return [{-(-keys // share) for share in each} for _, keys in blocks]


def agree(
    heads: Heads,
    requests: tuple[tuple[int, int], ...],
    eager: tuple[int, int],
    captured: tuple[int, int],
    captured_bound: int,
    multiprocessors: int,
    eager_bound: int = 0,
) -> bool:
    """Tell whether a captured launch splits each request as the eager one.

    `eager` and `captured` are rows of the longest request and keys of the table. Their bounds are 1, or 0 where the
    host chooses.
    """
    if tile(heads, 0 <= heads.window < eager[1] - 1) != tile(heads, 0 <= heads.window < captured[1] - 1):
        return False
    of_eager = eager_bound or bound(heads, *eager, multiprocessors)
    of_captured = captured_bound or bound(heads, *captured, multiprocessors)
    if of_captured > 1 and (len(requests) > 1 or heads.size < LEAST_SIZE):
        return False
    if of_eager == of_captured:
        # asked for every replay
        return True
    chosen = wanted(heads, requests, captured[1], multiprocessors)
    return all({min(of_eager, each) for each in one} == {min(of_captured, each) for each in one} for one in chosen)
