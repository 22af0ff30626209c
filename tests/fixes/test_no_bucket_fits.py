# SPDX-License-Identifier: Apache-2.0
"""A server whose prefill graph sizes are all too large, as far as the real ModelRunner comes with it."""

from __future__ import annotations

import pytest

from tests.fixes import alone
from tests.wheels import NEWEST


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_the_server_starts_and_is_eager(release: str) -> None:
    found = alone.found("no_bucket_fits", release, "tests.scenarios.oversized_buckets")
    assert found["applied"] == ["no_bucket_fits"]
    assert found["with"] == ["EagerRunner", True]
    assert found["without"] == "'EagerRunner' object has no attribute 'runner'"
