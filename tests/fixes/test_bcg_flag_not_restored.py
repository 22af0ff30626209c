# SPDX-License-Identifier: Apache-2.0
"""The scope of a breakable graph inside another one, on every release's own context manager."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.fixes import bcg_flag_not_restored as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes, wheels
from tests.wheels import RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_the_outer_scope_goes_on_after_the_inner_one(release: str) -> None:
    found, _ = processes.beside(wheels.unpacked(release), "-m", "tests.scenarios.nested_scopes")
    ended_by_the_inner_one = [True, False, False, False, False]
    assert found["stock"] == found["undone"] == ended_by_the_inner_one
    assert found["mended"] == [True, True, False, True, False]


def test_it_is_off_unless_asked_for() -> None:
    """No release nests these scopes, so none needs to be touched."""
    assert declared_in(fix).default == "off"
