# SPDX-License-Identifier: Apache-2.0
"""Tokens that a rank stores under decode context parallelism: the real Triton backend inside a padded break."""

from __future__ import annotations

from typing import Any

import pytest

from tests import processes, wheels


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.17"])
def test_a_rank_stores_its_own_tokens_only(release: str) -> None:
    names = ["attention_tail_uninitialised", "break_positions_padded"]
    flags: dict[str, Any] = {f"SGLANG_BCG_FIX_{name.upper()}": "on" for name in names}
    found, _ = processes.beside(
        wheels.unpacked(release), "-m", "tests.scenarios.context_parallel_break", SGLANG_BCG_FIXES="off", **flags
    )
    # both change this break where both are needed
    assert found["applied"] == (names if release == "0.5.15.post1" else names[1:])
    assert found["with"] == [[False, True, False, True, False], 8]
    assert found["without"] == [None, 8]
