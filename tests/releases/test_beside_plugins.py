# SPDX-License-Identifier: Apache-2.0
"""Other plugins of SGLang beside ours in a real release: both are live in either order, or the loss is said."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.wheels import NEWEST

RELEASES = ("0.5.17", "0.5.20", NEWEST)
# a function that is a break in the first release, where this fix changes what the break runs
BROKEN = {"0.5.17": ["break_positions_padded"]}
Beside = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def beside(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Beside:
    """Run a model beside these plugins, in a folder as pip leaves it."""

    def run(release: str, plugins: str, first: str) -> tuple[dict[str, Any], str]:
        for name in plugins.split(","):
            info = tmp_path / f"other_{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other-{name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = tests.other_plugins.{name}:load\n")
        arguments = ("-m", "tests.scenarios.beside_plugins", "one_prefill", str(tmp_path), first)
        return processes.beside(release_root(release), *arguments, SGLANG_PLUGINS=f"bcg_fixes,{plugins}")

    return run


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("plugins", ["runner", "graph", "attention", "runner,graph,attention"])
@pytest.mark.parametrize("release", RELEASES)
def test_plugins_that_call_what_they_found_and_ours_are_live(
    beside: Beside, release: str, plugins: str, first: str
) -> None:
    found, log = beside(release, plugins, first)
    assert found["is_right"] and found["replays"], found
    assert found["calls"].keys() == {*plugins.split(",")}, found
    assert found["live"] == found["applied"] and "ssm_mixer_captured" in found["live"], found
    assert found["lost"] == {} and "LOST" not in log, found
    # it sets its wrapper at once, and so around a break if it is called first
    hidden = BROKEN.get(release, []) if "attention" in plugins and first == "theirs" else []
    assert [*found["failed"]] == hidden and all("around the graph break" in why for why in found["failed"].values())
    assert all(f"bcg-fixes: {name} is not applied (failed)" in log for name in hidden), log


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("release", RELEASES)
def test_what_another_plugin_has_replaced_is_lost_and_its_file_named(beside: Beside, release: str, first: str) -> None:
    found, log = beside(release, "replacement", first)
    assert found["calls"]["replacement"] and found["failed"] == {}, found
    assert "draft_ids_out_of_range" in found["lost"], found
    assert sorted([*found["live"], *found["lost"]]) == found["applied"], found
    for name, why in found["lost"].items():
        assert "PrefillCudaGraphRunner.load_batch from " in why and "/other_plugins/replacement.py:" in why, why
        assert f"bcg-fixes: {name} was applied and is LOST: " in log, log
