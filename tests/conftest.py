from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from tests import wheels

# before anything imports triton: its own functions are made for the interpreter or for a GPU at that moment
os.environ.setdefault("TRITON_INTERPRET", "1")
# there is a worker for every core
os.environ.setdefault("OMP_NUM_THREADS", "1")

DRIFTED = pathlib.PurePath("sglang/srt/layers/radix_linear_attention.py")


@pytest.fixture(scope="session")
def release_root() -> Callable[[str], pathlib.Path]:
    """From a release to the folder that holds its `sglang/`; fetched with pip where it is not at hand."""
    return wheels.unpacked


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
