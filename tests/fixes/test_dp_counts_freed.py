# SPDX-License-Identifier: Apache-2.0
"""The rows that are a rank's own, computed by SGLang in a captured graph and read after a replay."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.fixes import settings


@pytest.mark.parametrize("flag", ["off", "on"])
def test_a_replay_computes_the_rows_of_its_capture(release_root: Callable[[str], pathlib.Path], flag: str) -> None:
    captured, replayed, is_replayed = processes.beside(
        release_root("0.5.16"), "-m", "tests.scenarios.data_parallel_rows", **settings.only("dp_counts_freed", flag)
    )[0]
    assert is_replayed and captured == [8, 8]
    assert replayed == (captured if flag == "on" else [0x7F7F7F7F] * 2)
