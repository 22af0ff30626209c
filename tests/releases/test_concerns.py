# SPDX-License-Identifier: Apache-2.0
"""What fixes say of the launches that their defects concern, against every server that has shown one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes.cli import for_launch
from sglang_bcg_fixes.concern import Harm, Launch
from sglang_bcg_fixes.lab.verify import cases, models
from sglang_bcg_fixes.lab.verify.compare import GREEN
from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import releases
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes, wheels
from tests.harm import matrix, rules

FIXES = registry.discover().fixes
CASES = {case.name: case for case in cases.CASES}
RESULTS = processes.REPOSITORY / "benchmarks" / "results"
ALONE = ("0.5.11", "0.5.12.post1", "0.5.15.post1")
RECORDED = tuple(release for release in wheels.RELEASES if (RESULTS / f"verify-{release}.json").exists())
# on the harm matrix a server has prefill graphs whether its release makes them by default or not
WITH_GRAPHS = {"--cuda-graph-backend-prefill": ["breakable"], "--enable-breakable-cuda-graph": []}


def affected(source: Source) -> list[Fix]:
    return [fix for fix in FIXES if fix.probe(source).verdict is Verdict.AFFECTED]


def words(value: Any) -> list[str]:
    if value is True:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def options_of(arguments: dict[str, Any]) -> dict[str, list[str]]:
    return {f"--{name.replace('_', '-')}": words(value) for name, value in arguments.items() if value is not False}


def servers(file: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What `verify` recorded on a GPU, by case, arm and the fix that was alone."""
    found = json.loads((RESULTS / file).read_text())["servers"]
    return {(row["case"], row["arm"], row.get("fix") or ""): row for row in found}


def launch_of(row: dict[str, Any], source: Source) -> Launch:
    options = {name: words(value) for name, value in row["flags"].items() if value is not False}
    return Launch(source, models.MODELS[CASES[row["case"]].model].config_json(), options, "hopper")


@pytest.mark.parametrize("release", ALONE)
def test_a_defect_concerns_the_servers_that_one_fix_alone_has_mended(release: str) -> None:
    source, rows = releases.in_folder(wheels.unpacked(release)), servers(f"verify-alone-{release}.json")
    known, shown = {fix.id: fix for fix in FIXES}, 0
    for (case, arm, alone), row in rows.items():
        if arm == "alone" and row["verdict"] == GREEN != rows[case, "stock", ""]["verdict"]:
            told = for_launch.worst(known[alone].concerns, launch_of(row, source))
            assert told is not None, f"{release}: {alone} is said not to concern {case}: {row['flags']}"
            shown += 1
    assert shown


@pytest.mark.parametrize("release", RECORDED)
def test_a_server_that_a_gpu_has_seen_mended_is_warned(release: str) -> None:
    source, rows = releases.in_folder(wheels.unpacked(release)), servers(f"verify-{release}.json")
    known, shown = affected(source), 0
    for (case, arm, _), row in rows.items():
        if arm == "patched" and row["verdict"] == GREEN != rows[case, "stock", ""]["verdict"]:
            launch = launch_of(row, source)
            assert any(for_launch.worst(fix.concerns, launch) for fix in known), f"{release}: {case}: {row['flags']}"
            shown += 1
    assert shown


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_a_server_that_is_mended_on_the_harm_matrix_is_warned(release: str) -> None:
    source, rows = releases.in_folder(wheels.unpacked(release)), matrix.recorded(release)
    known = affected(source)
    for name in sorted({name for name, _ in rows}):
        stock, patched = rows[name, matrix.STOCK], rows[name, matrix.PATCHED]
        if not rules.is_wrong(stock) or rules.is_wrong(patched):
            continue
        configuration = architectures.CONFIGURATIONS[name]
        options = {**WITH_GRAPHS, **options_of(configuration.server_args)}
        launch = Launch(source, {**configuration.config, "architectures": [name]}, options)
        told = [concern.harm for fix in known if (concern := for_launch.worst(fix.concerns, launch))]
        assert {Harm.WRONG, Harm.ENDS} & set(told), f"{release}, {name}: {told}"


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: fix.id)
def test_every_fix_says_whom_its_defect_concerns(fix: Fix) -> None:
    assert fix.concerns and all(concern.conditions for concern in fix.concerns)
