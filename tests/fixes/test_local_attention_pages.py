# SPDX-License-Identifier: Apache-2.0
"""Local attention on pages of sixteen tokens: the real FlashAttentionBackend, against what it must amount to."""

from __future__ import annotations

import numpy
import pytest
import torch

from sglang_bcg_fixes.fixes import local_attention_pages as fix
from tests.fixes import alone

EAGER_IS_WRONG = ("0.5.11",)
ONLY_REPLAY_IS_WRONG = ("0.5.21",)


@pytest.mark.parametrize("release", (*EAGER_IS_WRONG, *ONLY_REPLAY_IS_WRONG))
def test_local_layers_see_their_chunk(release: str) -> None:
    found = alone.found("local_attention_pages", release, "tests.scenarios.local_attention")
    assert found["applied"] == ["local_attention_pages"]
    assert found["with"] == {"eager": True, "long": True, "short": True, "own pool": True}
    right = release in ONLY_REPLAY_IS_WRONG
    # a slot taken for a page lies behind the cache
    eager = True if right else "index 64 is out of bounds"
    assert found["without"] == {"eager": eager, "long": True, "short": right, "own pool": False}


def test_chunks_are_those_of_a_loop_over_every_token() -> None:
    generator = numpy.random.default_rng(0)
    for _ in range(300):
        page = int(generator.choice([2, 4, 16]))
        chunk = page * int(generator.integers(1, 5))
        lengths = generator.integers(1, 6 * chunk, size=generator.integers(1, 6))
        queries = numpy.array([generator.integers(1, length + 1) for length in lengths])
        table = torch.arange(len(lengths) * (-(-int(lengths.max()) // page))).view(len(lengths), -1)
        found = fix.chunks_of(chunk, page, numpy.concatenate([[0], numpy.cumsum(queries)]), lengths, table)
        expected: dict[tuple[int, int], list[int]] = {}
        for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
            for position in range(length - new, length):
                expected.setdefault((row, position // chunk), []).append(position)
        assert found.queries.tolist() == [len(new) for new in expected.values()]
        for (row, number), keys, pages in zip(expected, found.keys, found.pages, strict=True):
            seen = range(number * chunk, min((number + 1) * chunk, lengths[row]))
            assert keys == len(seen)
            assert pages[: -(-keys // page)].tolist() == table[row, seen[0] // page : seen[-1] // page + 1].tolist()
