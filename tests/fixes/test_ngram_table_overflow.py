# SPDX-License-Identifier: Apache-2.0
"""The table of n-gram embeddings as the real runner allots it, beside the real pool that numbers the requests."""

from __future__ import annotations

from tests import processes, wheels


def test_the_last_request_has_a_row() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.11"), "-m", "tests.scenarios.ngram_table")
    assert found["last"] == 3 and found["without"] == [3, 16]
    assert found["with"] == [4, 16] and found["dtype"] == "torch.int32"
    assert found["none"] is None
