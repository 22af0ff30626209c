# SPDX-License-Identifier: Apache-2.0
"""Answers of each release's prefill runner to each kind of batch, against the checked-in table.

`python -m tests.releases.test_kinds_of_request` writes the table anew, which takes half an hour. It holds SGLang's own
answers, and those with the plugin for the release where they differ.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import pytest

from tests import processes, wheels
from tests.releases import kinds_of_request
from tests.wheels import NEWEST

TABLE = pathlib.Path(__file__).with_name("kinds_of_request.json")
STOCK, PATCHED = "__none__", "bcg_fixes"
CHANGED = "0.5.11"
SAMPLE = [
    *((CHANGED, plugins, server) for plugins in (STOCK, PATCHED) for server in kinds_of_request.SERVERS),
    ("0.5.12.post1", PATCHED, "generation"),
    (NEWEST, PATCHED, "generation"),
]


def outcomes(root: pathlib.Path, plugins: str, server: str, folder: pathlib.Path) -> dict[str, str]:
    """The outcome of every case: replays, eager, or wrong and how."""
    report = folder / "report.json"
    process = processes.on_cpu(
        root,
        *("-m", "tests.releases.kinds_of_request", str(report), server),
        environment={"SGLANG_PLUGINS": plugins},
        timeout=400,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(report.read_text())
    if "no graphs" in found:
        return {"all": f"no graphs: {found['no graphs']}"}
    return {name: outcome(case) for name, case in found["cases"].items()}


def outcome(case: dict[str, Any]) -> str:
    if isinstance(case["answers"], str):
        return "not served"
    if case["difference"] == 0.0:
        return "replays" if case["replayed"] else "eager"
    return f"wrong: {case['difference']}"


def column(release: str, plugins: str) -> str:
    return f"{release} with the plugin" if (release, plugins) == (CHANGED, PATCHED) else release


@pytest.mark.parametrize(("release", "plugins", "server"), SAMPLE)
def test_outcomes_are_those_of_the_table(release: str, plugins: str, server: str, tmp_path: pathlib.Path) -> None:
    found = outcomes(wheels.unpacked(release), plugins, server, tmp_path)
    assert found == json.loads(TABLE.read_text())[column(release, plugins)][server]


def test_with_the_plugin_nothing_is_wrong_and_ragged_batches_replay() -> None:
    table = json.loads(TABLE.read_text())
    assert set(table) == {*wheels.RELEASES, column(CHANGED, PATCHED)}
    del table[column(CHANGED, STOCK)]
    for name, servers in table.items():
        for server, cases in servers.items():
            bad = [case for case, found in cases.items() if found.startswith(("wrong", "no graphs"))]
            assert not bad, (name, server)
            assert {cases[case] for case in kinds_of_request.RAGGED} == {"replays"}, (name, server)


def test_without_it_the_first_release_is_wrong_or_eager() -> None:
    stock = json.loads(TABLE.read_text())[column(CHANGED, STOCK)]
    assert stock["generation"]["two requests"] == stock["generation"]["six requests"] == "eager"
    assert stock["generation"]["hidden states, all tokens: [6]"].startswith("wrong")
    assert stock["embedding"]["one request"].startswith("wrong")


def main() -> None:
    table: dict[str, dict[str, dict[str, str]]] = {}
    for release in wheels.RELEASES:
        root = wheels.unpacked(release)
        for plugins in (STOCK, PATCHED) if release == CHANGED else (STOCK,):
            for server in kinds_of_request.SERVERS:
                with tempfile.TemporaryDirectory() as folder:
                    found = outcomes(root, plugins, server, pathlib.Path(folder))
                table.setdefault(column(release, plugins), {})[server] = found
                print(column(release, plugins), server, sorted(set(found.values())), flush=True)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
