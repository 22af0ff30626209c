# SPDX-License-Identifier: Apache-2.0
"""The plugin on the modules of every real release: what it changes, what it leaves, and that it can be taken off."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import linear_attention_captured
from sglang_bcg_fixes.planning import registry
from tests import processes
from tests.wheels import RELEASES

FIX = registry.declared_in(linear_attention_captured)

Root = Callable[[str], pathlib.Path]
MODULE = "sglang.srt.layers.radix_linear_attention"
OPERATION = "unified_linear_attention_with_output"
BREAK = f"bcg_{OPERATION}"
AFFECTED = ("0.5.11", "0.5.12", "0.5.12.post1")


def run(root: pathlib.Path, scenario: str, reports: pathlib.Path, **environ: str) -> subprocess.CompletedProcess[str]:
    arguments = ("-m", "tests.scenarios.whole_release", scenario)
    return processes.on_cpu(root, *arguments, environment={"SGLANG_BCG_REPORT_DIR": str(reports), **environ})


def since(release: str, first: str) -> bool:
    return RELEASES.index(release) >= RELEASES.index(first)


@pytest.mark.parametrize("release", RELEASES)
def test_exactly_what_is_needed_is_changed_and_comes_off_again(
    release_root: Root, release: str, tmp_path: pathlib.Path
) -> None:
    found = processes.result(run(release_root(release), "whole_cycle", tmp_path / "reports"))
    affected = release in AFFECTED
    operation = OPERATION if affected else BREAK
    tail = not affected and not since(release, "0.5.19")
    assert [place for place in found["changed"] if place.startswith(MODULE)] == (
        [f"{MODULE}:{operation}"] if affected or tail else []
    )
    assert found["changed"] and found["unaccounted for"] == []
    assert {"break_input_lifetime", *(["linear_tail_uninitialised"] if tail else [])} <= set(found["applied"])
    assert found["state"] == ("applied" if affected else "not needed")
    assert found["imported"] == [], "the plugin imports nothing that the process did not have"
    assert not any(found["wrong"].values()) and found["left_after_undo"] == []
    # the release's breaks, each rebuilt in the form that its own decorator gives it
    breaks = found["breaks"]
    linear = [place for place in breaks if place.startswith(MODULE)]
    assert bool(linear) is not affected and any(place not in linear for place in breaks), breaks
    assert all(breaks[place] for place in linear) is (affected or since(release, "0.5.20")), breaks
    assert found["has_run_eager"] is since(release, "0.5.23") and found["calls"] == 1 + found["has_run_eager"]


# other fixes of this release know their source, and change it
OTHERS_OFF = {fix.flag: "off" for fix in registry.discover().fixes if fix.patches and fix.id != FIX.id}


def test_a_drifted_release_stays_as_it_is_and_says_so(drifted_root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = run(drifted_root, "loaded_by_sglang", tmp_path / "reports", **OTHERS_OFF)
    assert processes.result(done)["changed"] == []
    assert "bcg-fixes" not in done.stderr, "no model says yet if that concerns it"


@pytest.mark.parametrize(
    "environ", [{"SGLANG_BCG_FIXES": "strict"}, {"SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED": "on"}]
)
def test_a_drifted_release_is_refused_through_sglangs_own_loader(
    drifted_root: pathlib.Path, tmp_path: pathlib.Path, environ: dict[str, str]
) -> None:
    done = run(drifted_root, "loaded_by_sglang", tmp_path / "reports", **environ)
    assert done.returncode == 1 and "RESULT" not in done.stdout, "SGLang swallowed the refusal"
    assert "bcg-fixes refuses to start without SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED (unread)" in done.stderr


def test_without_the_plugins_name_sglang_does_not_load_it(release_root: Root, tmp_path: pathlib.Path) -> None:
    done = run(release_root("0.5.12.post1"), "loaded_by_sglang", tmp_path / "reports", SGLANG_PLUGINS="__none__")
    assert processes.result(done)["changed"] == [] and "bcg-fixes" not in done.stderr
    assert not os.path.exists(tmp_path / "reports")
