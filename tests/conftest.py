# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from tests import forms, wheels

# before anything imports triton: its own functions are made for the interpreter or for a GPU at that moment
os.environ.setdefault("TRITON_INTERPRET", "1")
# there is a worker for every core
os.environ.setdefault("OMP_NUM_THREADS", "1")
# hundreds of processes import the same modules, SGLang's thousand among them; see also tests/processes.py
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

FORMS_OF = "forms_of"
EVERY_RELEASE = "every_release"
# what starts a release for each of its tests
BEHAVIOUR = ("bench", "fixes", "releases", "verify")
DRIFTED = pathlib.PurePath("sglang/srt/layers/radix_linear_attention.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--everything", action="store_true", help="every release and pair, as `make test-all`")


def pytest_configure(config: pytest.Config) -> None:
    # syntax trees of sixteen releases are millions of objects that stay, and each collection would look at all of them
    gc.disable()
    config.addinivalue_line("markers", f"{FORMS_OF}(*about): only releases that differ in these; see tests/forms.py")
    config.addinivalue_line("markers", f"{EVERY_RELEASE}: those between the oldest and the newest, too")


# after pytest has put tests with the same parameter side by side
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--everything"):
        others = set(without_a_difference(items))
        others.update(in_between([item for item in items if item not in others]))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    # those on one release follow each other, and find it imported; see tests/warm.py
    items.sort(key=lambda item: wheels.RELEASES.index(release_of(item) or named_by(item) or wheels.RELEASES[0]))


def without_a_difference(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Tests on a release that has the same forms as one before it."""
    by_test: dict[tuple[pytest.Item | pytest.Collector | None, str], dict[pytest.Item, str]] = {}
    for item in items:
        release = release_of(item)
        if release and item.get_closest_marker(FORMS_OF):
            by_test.setdefault((item.parent, getattr(item, "originalname", item.name)), {})[item] = release
    for releases in by_test.values():
        among = sorted(set(releases.values()), key=wheels.RELEASES.index)
        for item, release in releases.items():
            marker = item.get_closest_marker(FORMS_OF)
            if marker and release not in forms.releases_that_differ(*marker.args, among=tuple(among)):
                yield item


def in_between(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Tests of behaviour on a release that is neither the oldest nor the newest of those that the test names."""
    by_test: dict[tuple[object, ...], dict[pytest.Item, str]] = {}
    for item in items:
        release = release_of(item)
        if release and item.path.parent.name in BEHAVIOUR and not item.get_closest_marker(EVERY_RELEASE):
            # of each other parameter, its own oldest and newest
            other = item.name.replace(release, "")
            by_test.setdefault((item.parent, getattr(item, "originalname", item.name), other), {})[item] = release
    for releases in by_test.values():
        among = sorted(releases.values(), key=wheels.RELEASES.index)
        yield from (item for item, release in releases.items() if release not in (among[0], among[-1]))


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
    """True under `make test-all`."""
    asked: bool = request.config.getoption("--everything")
    return asked


@pytest.fixture
def drifted_root(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> pathlib.Path:
    """0.5.12.post1 with one more statement in what a fix would patch; the rest are links to the real files."""
    original, changed = release_root("0.5.12.post1"), tmp_path / "drifted"
    here = pathlib.Path()
    for part in DRIFTED.parts:
        (changed / here).mkdir(parents=True, exist_ok=True)
        for entry in (original / here).iterdir():
            if entry.name != part:
                (changed / here / entry.name).symlink_to(entry)
        here = here / part
    text = (original / DRIFTED).read_text()
    start = "context = get_forward_context()"
    assert text.count(start) == 1
    (changed / DRIFTED).write_text(text.replace(start, f"{start}\n    drifted = True"))
    return changed
