# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Callable

import pytest

from tests import mutated, wheels

# before anything imports triton: its own functions are made for the interpreter or for a GPU at that moment
os.environ.setdefault("TRITON_INTERPRET", "1")
# there is a worker for every core
os.environ.setdefault("OMP_NUM_THREADS", "1")
# hundreds of processes import the same modules, SGLang's thousand among them; see also tests/processes.py
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# what starts a release for each of its tests
BEHAVIOUR = ("bench", "fixes", "harm", "releases", "verify")
DRIFTED = "sglang/srt/layers/radix_linear_attention.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="every pair and combination")


def pytest_configure(config: pytest.Config) -> None:
    # syntax trees of sixteen releases are millions of objects that stay, and each collection would look at all of them
    gc.disable()


# after pytest has put tests with the same parameter side by side
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # those on one release follow each other, and find it imported; see tests/warm.py
    items.sort(key=lambda item: wheels.RELEASES.index(release_of(item) or named_by(item) or wheels.RELEASES[0]))


def row_of(item: pytest.Item) -> str:
    """The release of its row in tests/ledger.py; none where a file's tests start no release for each of them."""
    return (item.path.parent.name in BEHAVIOUR and release_of(item)) or ""


def release_of(item: pytest.Item) -> str | None:
    """The release among its parameters."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for value in given.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and part in wheels.RELEASES:
                return part
    return None


def named_by(item: pytest.Item) -> str | None:
    """The first release that its function names, itself or by a constant of its module."""
    function = getattr(item, "function", None)
    if function is None:
        return None
    code = function.__code__
    named = (*code.co_consts, *(function.__globals__.get(name) for name in code.co_names))
    return next((value for value in named if isinstance(value, str) and value in wheels.RELEASES), None)


def pytest_runtest_logfinish() -> None:
    # what the test has made and left in circles; what is older stays
    gc.collect(1)


@pytest.fixture(scope="session")
def release_root() -> Callable[[str], pathlib.Path]:
    """Map a release to the folder that holds its `sglang/`; pip fetches it where it is not at hand."""
    return wheels.unpacked


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """True where every pair and combination is asked for."""
    asked: bool = request.config.getoption("--everything")
    return asked


@pytest.fixture
def drifted_root(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> pathlib.Path:
    """0.5.12.post1 with one more statement in what a fix would patch; the rest are links to the real files."""
    start = "context = get_forward_context()"
    changed = tmp_path / "drifted"
    mutated.write(release_root("0.5.12.post1"), DRIFTED, start, f"{start}\n    drifted = True", changed)
    return changed
