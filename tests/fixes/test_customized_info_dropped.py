# SPDX-License-Identifier: Apache-2.0
"""A model that adds something to its answer: does it come out of a real replay?"""

from __future__ import annotations

import pytest

from tests.fixes import alone


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.20"])
def test_what_the_model_added_comes_out_of_a_replay(release: str) -> None:
    found = alone.found("customized_info_dropped", release, "tests.scenarios.added_info")
    assert found["applied"] == ["customized_info_dropped"]
    assert found["with"] == [{"request": ["first", "second"]}, True, False]
    assert found["without"] == [None, True, False]
