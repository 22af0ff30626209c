# SPDX-License-Identifier: Apache-2.0
"""A model that adds something to its answer: does it come out of a real replay?"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.fixes import settings


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.20"])
def test_what_the_model_added_comes_out_of_a_replay(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(
        release_root(release), "-m", "tests.scenarios.added_info", **settings.only("customized_info_dropped")
    )
    assert found["applied"] == ["customized_info_dropped"]
    assert found["with"] == [{"request": ["first", "second"]}, True, False]
    assert found["without"] == [None, True, False]
