# SPDX-License-Identifier: Apache-2.0
"""The recorded options of each release: `python -m tests.releases.test_offered` writes them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import offered, releases, verdicts
from tests import wheels

OPTIONS = sorted({way.option for fix in registry.discover().fixes for way in fix.workarounds})


def options_in(root: pathlib.Path) -> list[str]:
    source = releases.in_folder(root)
    return [option for option in OPTIONS if source.has_option(option)]


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_recorded_options_are_those_of_the_release(release: str, release_root: Callable[[str], pathlib.Path]) -> None:
    again = "run `python -m tests.releases.test_offered`"
    assert offered.recorded().get(release) == options_in(release_root(release)), again


def test_releases_are_said_in_spans() -> None:
    every = list(verdicts.recorded())
    assert offered.spans(every) == f"{every[0]} to {every[-1]}" and offered.spans([]) == ""
    assert offered.spans([every[0], every[2], every[3]]) == f"{every[0]}, {every[2]} to {every[3]}"
    assert offered.has_option("0.5.23", "--cuda-graph-backend-prefill")
    assert not offered.has_option("0.5.11", "--cuda-graph-backend-prefill")


if __name__ == "__main__":
    table = {release: options_in(wheels.unpacked(release)) for release in wheels.RELEASES}
    offered.FILE.write_text(json.dumps(table, indent=1) + "\n")
