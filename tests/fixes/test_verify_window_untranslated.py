# SPDX-License-Identifier: Apache-2.0
"""The table that sliding window layers verify drafts with, put together by the real backend and its kernel."""

from __future__ import annotations

from tests import processes, wheels

UNTOUCHED = [[[1, 2, 3], [4, 5, 0]], [[7, 0], [7, 8], [9, 0], [9, 6]]]
OF_ALL_TOKENS = [[1, 2, 3, 7], [1, 2, 3, 7, 8], [4, 5, 9], [4, 5, 9, 6]]
OF_THE_WINDOW = [[100 + slot for slot in row] for row in OF_ALL_TOKENS]


def test_layers_with_a_window_look_into_their_own_cache() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.11"), "-m", "tests.scenarios.window_tables", "--apply")
    assert found["stock"] == [OF_ALL_TOKENS, *UNTOUCHED]
    assert found["patched"] == [OF_THE_WINDOW, *UNTOUCHED]
    assert found["one cache"] == [OF_ALL_TOKENS, *UNTOUCHED]


def test_later_releases_do_so_by_themselves() -> None:
    found, _ = processes.beside(wheels.unpacked("0.5.12"), "-m", "tests.scenarios.window_tables")
    assert found["stock"] == [OF_THE_WINDOW, *UNTOUCHED]
