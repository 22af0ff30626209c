# SPDX-License-Identifier: Apache-2.0
"""Prefixes that the host loads while a captured segment reads them, as DeepSeek-V4's compressors do: red and green."""

from __future__ import annotations

import pytest

from tests.fixes import alone
from tests.fixes.test_layer_loads_unawaited import LAYERS, RIGHT, STOCK

FIX = "compressor_loads_unawaited"


@pytest.mark.parametrize("release", ["0.5.13", "0.5.14", "0.5.15.post1", "0.5.17", "0.5.20", "0.5.22", "0.5.23"])
def test_a_replay_waits_for_the_last_layer_of_a_pool_that_is_read_in_a_segment(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.loaded_layers", "compressors")
    assert found == {"layers": LAYERS, "applied": [FIX], "with": RIGHT, "without": STOCK}
