# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of sparse latent attention, around a backend that computes the real rows."""

from __future__ import annotations

import pytest

from tests.fixes import alone


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.16"])
def test_padded_rows_are_zero_and_real_rows_as_before(release: str) -> None:
    found = alone.found("fused_mla_tail_uninitialised", release, "tests.scenarios.fused_mla_tail")
    affected = release == "0.5.15.post1"
    assert found["applied"] == (["fused_mla_tail_uninitialised"] if affected else [])
    assert found["with"] == ["zero", True]
    assert found["without"] == ["nan" if affected else "zero", True]
