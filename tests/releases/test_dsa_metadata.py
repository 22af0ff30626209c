# SPDX-License-Identifier: Apache-2.0
"""What docs/upstream/dsa_metadata_freed.md says of code that only ROCm runs."""

from __future__ import annotations

from tests import processes, wheels


def test_a_longer_prefill_frees_the_buffers_of_decode() -> None:
    told, _ = processes.beside(wheels.unpacked(wheels.RELEASES[-1]), "-m", "tests.scenarios.dsa_metadata")
    assert told == {"kept for as many": True, "kept for more": False, "made anew": True}
