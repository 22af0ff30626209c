# SPDX-License-Identifier: Apache-2.0
"""The rows that are a rank's own, computed by SGLang in a captured graph and read after a replay."""

from __future__ import annotations

import pytest

from tests.fixes import alone


@pytest.mark.parametrize("flag", ["off", "on"])
def test_a_replay_computes_the_rows_of_its_capture(flag: str) -> None:
    captured, replayed, is_replayed = alone.found(
        "dp_counts_freed", "0.5.16", "tests.scenarios.data_parallel_rows", flag=flag
    )
    assert is_replayed and captured == [8, 8]
    assert replayed == (captured if flag == "on" else [0x7F7F7F7F] * 2)
