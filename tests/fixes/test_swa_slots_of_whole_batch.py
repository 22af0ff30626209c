# SPDX-License-Identifier: Apache-2.0
"""The halves of a batch in a real sliding window pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import swa_slots_of_whole_batch as fix
from tests import processes, wheels


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_each_half_goes_to_its_own_slots(release: str) -> None:
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.window_pool")
    # slot n of the one pool is slot 16 - n of the other
    right = [float(16 - row) if 16 - row in range(3, 8) else 0.0 for row in range(17)]
    same = {"whole": right, "kept": [13, 12, 11, 10, 9]}
    assert found["without"] == {**same, "halves": "shape mismatch"}
    assert found["with"] == {**same, "halves": right}


@pytest.mark.parametrize(
    ("prepared", "used"), [(None, None), ([7, 8], [7, 8]), ([7, 8, 9], None)], ids=["none", "of the call", "of more"]
)
def test_slots_that_are_the_calls_own_are_used(prepared: Any, used: Any) -> None:
    """They were looked up before the graph was replayed, which a look-up in each layer would do again."""
    pool, seen = SimpleNamespace(swa_loc=prepared), []
    fix.look_up_those_of_the_call(lambda self, layer, loc: seen.append(self.swa_loc), pool, None, [1, 2])
    assert (seen, pool.swa_loc) == ([used], prepared)
