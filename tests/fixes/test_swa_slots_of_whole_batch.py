# SPDX-License-Identifier: Apache-2.0
"""The halves of a batch in a real sliding window pool."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_each_half_goes_to_its_own_slots(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(release_root(release), "-m", "tests.scenarios.window_pool")
    # slot n of the one pool is slot 16 - n of the other
    right = [float(16 - row) if 16 - row in range(3, 8) else 0.0 for row in range(17)]
    same = {"whole": right, "kept": [13, 12, 11, 10, 9]}
    assert found["without"] == {**same, "halves": "shape mismatch"}
    assert found["with"] == {**same, "halves": right}
