# SPDX-License-Identifier: Apache-2.0
"""The mask of checkpoints that a replayed mixed batch hands to its layers: real scheduler batch, runner and buffers."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.fixes import settings


@pytest.mark.parametrize("release", ["0.5.14", "0.5.22"])
def test_a_mixed_batch_writes_no_checkpoint(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found = processes.beside(
        release_root(release), "-m", "tests.scenarios.mamba_tracking", **settings.only("mamba_tracking_stale")
    )[0]
    assert found["applied"] == ["mamba_tracking_stale"]
    assert found["mixing_drops_the_mask"] is True
    replayed, earlier = True, [[True, True], [5, 6]]
    assert found["without"] == [replayed, earlier, earlier]
    assert found["with"] == [replayed, earlier, [[False, False], [5, 6]]]
