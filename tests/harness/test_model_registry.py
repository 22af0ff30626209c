# SPDX-License-Identifier: Apache-2.0
"""Models that are imported when they are looked up are those that SGLang's own registry lists."""

from __future__ import annotations

import pytest

from tests import processes, wheels
from tests.wheels import NEWEST


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.17", NEWEST])
def test_one_by_one_and_all_at_once_they_are_the_same(release: str) -> None:
    program = ("-m", "tests.scenarios.registered_models")
    found, whole = (
        processes.beside(wheels.unpacked(release), *program, way, SGLANG_PLUGINS="none")[0]
        for way in ("one_by_one", "whole")
    )
    assert found["rest"] == whole["rest"]
    assert found["rest"]["known"] == {"unknown": False, "phi": True}
    assert found["rest"]["listed"] == len(found["rest"]["places"]) > 100
    assert 0 < found["few"] < found["all"] / 3 and whole["few"] == 0
