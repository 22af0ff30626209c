# SPDX-License-Identifier: Apache-2.0
"""The mask of checkpoints that a replayed mixed batch hands to its layers: real scheduler batch, runner and buffers."""

from __future__ import annotations

import pytest

from tests.fixes import alone


@pytest.mark.parametrize("release", ["0.5.14", "0.5.22"])
def test_a_mixed_batch_writes_no_checkpoint(release: str) -> None:
    found = alone.found("mamba_tracking_stale", release, "tests.scenarios.mamba_tracking")
    assert found["applied"] == ["mamba_tracking_stale"]
    assert found["mixing_drops_the_mask"] is True
    replayed, earlier = True, [[True, True], [5, 6]]
    assert found["without"] == [replayed, earlier, earlier]
    assert found["with"] == [replayed, earlier, [[False, False], [5, 6]]]
