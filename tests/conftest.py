from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import wheels


@pytest.fixture(scope="session")
def release_root() -> Callable[[str], pathlib.Path]:
    """From a release to the folder that holds its `sglang/`; fetched with pip where it is not at hand."""
    return wheels.unpacked
