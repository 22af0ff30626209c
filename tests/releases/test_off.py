# SPDX-License-Identifier: Apache-2.0
"""`SGLANG_BCG_FIXES=off`: the oldest and the newest release, with the plugin and without, cannot be told apart."""

from __future__ import annotations

import json
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any, cast

import pytest

from sglang_bcg_fixes.model import Patched, modules_of
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.process import watch
from sglang_bcg_fixes.process.process import Process
from sglang_bcg_fixes.process.selfcheck import at_start, canary
from sglang_bcg_fixes.source import releases
from tests import processes, wheels

Seen = Callable[..., dict[str, Any]]
SEEN_ALIKE = ("finders", "path hooks", "threads", "signals", "hooks", "descriptors", "missing", "attributes")
OFF = {"SGLANG_BCG_FIXES": "off"}
# the number of modules that can be imported without a GPU, at least
MOST = 0.8


def touched(root: pathlib.Path) -> list[str]:
    """Every module of this release that the plugin may change, whatever its flags say."""
    source, known = releases.in_folder(root), registry.discover()
    makers = (watch.hooks, at_start.hooks, canary.hooks)
    # the source is all that hooks are made from
    process = cast(Process, types.SimpleNamespace(source=source))
    hooks = [hook for make in makers for hook in make(process)]
    patched: list[Patched] = [*known.fixes, *known.kernels, *hooks]
    names = [name for each in patched for name in modules_of(each)]
    names += [name for kernel in known.kernels for name in kernel.awaits]
    return [name for name in dict.fromkeys(names) if source.has_module(name)]


@pytest.fixture(params=[wheels.RELEASES[0], wheels.RELEASES[-1]])
def seen(request: pytest.FixtureRequest, release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Seen:
    root = release_root(request.param)
    modules = touched(root)

    def look(**environ: str) -> dict[str, Any]:
        environment = {"SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"), **environ}
        done = processes.on_cpu(root, "-m", "tests.releases.attributes", json.dumps(modules), environment=environment)
        found: dict[str, Any] = processes.result(done)
        assert len(found["missing"]) < (1 - MOST) * len(modules), found["missing"]
        return found | {"log": done.stderr}

    return look


def differences(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Differences by name."""
    parts = [name for name in SEEN_ALIKE if name != "attributes" and found[name] != other[name]]
    of_both = found["attributes"].keys() | other["attributes"].keys()
    return {name: [found[name], other[name]] for name in parts} | {
        name: [found["attributes"].get(name), other["attributes"].get(name)]
        for name in of_both
        if found["attributes"].get(name) != other["attributes"].get(name)
    }


def test_off_is_as_without_the_plugin_and_on_by_its_own_flag_is_what_it_says(seen: Seen) -> None:
    without, off = seen(SGLANG_PLUGINS="__none__"), seen(**OFF)
    assert not re.search("bcg-fixes[ :]", off["log"]) and without["our modules"] == 0 < off["our modules"]
    assert differences(without, off) == {}
    assert "sglang_bcg_fixes" not in json.dumps(off["attributes"])
    assert off["our handlers"] == {"at exit": [], "at fork": []}
    # what is looked at shows a fix, and a check, that was asked for by its own flag
    named = differences(without, seen(**OFF, SGLANG_BCG_FIX_BREAK_INPUT_LIFETIME="on"))
    assert named and "sglang_bcg_fixes" in json.dumps(named)
    [scheduler] = [
        name
        for name in differences(without, seen(**OFF, SGLANG_BCG_SELFCHECK="warn"))
        if name.startswith("sglang.") and name.partition(":")[2] == at_start.SCHEDULER.partition(":")[2]
    ]
    assert scheduler == at_start.SCHEDULER
