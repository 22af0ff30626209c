# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of sparse latent attention, around a backend that computes the real rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.fixes import settings


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.16"])
def test_padded_rows_are_zero_and_real_rows_as_before(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found, _ = processes.beside(
        release_root(release), "-m", "tests.scenarios.fused_mla_tail", **settings.only("fused_mla_tail_uninitialised")
    )
    affected = release == "0.5.15.post1"
    assert found["applied"] == (["fused_mla_tail_uninitialised"] if affected else [])
    assert found["with"] == ["zero", True]
    assert found["without"] == ["nan" if affected else "zero", True]
