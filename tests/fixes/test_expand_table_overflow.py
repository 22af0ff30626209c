# SPDX-License-Identifier: Apache-2.0
"""Tables of draft steps as the real backend allots them, filled with pages by the function that its replays call."""

from __future__ import annotations

import pytest

from tests import processes, wheels


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_a_step_has_room_for_the_pages_it_is_given(release: str) -> None:
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.draft_tables", TORCHDYNAMO_DISABLE="1")
    assert found["with"] == [True, True, True]
    out_of_bounds = "index 2 is out of bounds for dimension 1"
    assert found["without"] == [out_of_bounds, True, True]
