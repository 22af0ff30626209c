# SPDX-License-Identifier: Apache-2.0
"""A server whose prefill graph sizes are all too large, as far as the real ModelRunner comes with it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes
from tests.fixes import settings
from tests.wheels import NEWEST


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_the_server_starts_and_is_eager(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found = processes.beside(
        release_root(release), "-m", "tests.scenarios.oversized_buckets", **settings.only("no_bucket_fits")
    )[0]
    assert found["applied"] == ["no_bucket_fits"]
    assert found["with"] == ["EagerRunner", True]
    assert found["without"] == "'EagerRunner' object has no attribute 'runner'"
