# SPDX-License-Identifier: Apache-2.0
"""What docs/upstream/lightning_history_undecayed.md says of a kernel that no fix of ours touches."""

from __future__ import annotations

import pytest

from tests import processes, wheels


@pytest.mark.parametrize("release", [wheels.RELEASES[0], wheels.RELEASES[-1]])
def test_prefill_weighs_what_lies_before_a_block_by_one_decay_too_much(release: str) -> None:
    told, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.lightning_history")
    assert told["state"] < 1e-5, "the stored state is right"
    assert told["first block, no state"] < 1e-5, "so is a prompt of one block"
    assert told["second block"] > 0.01 and told["after a state"] > 0.01, told
    assert told["history weighs"] == pytest.approx(told["one decay"], rel=1e-3)
