# SPDX-License-Identifier: Apache-2.0
"""Generate source/served.json: how servers of each model have answered on each release, for `doctor` to say it.

A CPU ran the harm matrix's servers with breakable prefill graphs asked for, a GPU those of `bcg-fixes verify`. Models
of the newest release without a prefill graph, by default or at all, are those of the registry's table.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

import harm_page  # noqa: E402

from sglang_bcg_fixes.lab.verify import cases, models  # noqa: E402
from sglang_bcg_fixes.source import served  # noqa: E402
from tests.harm import rules  # noqa: E402

REGISTRY = REPOSITORY / "tests" / "releases" / "registry_graphs.json"
RESULTS = REPOSITORY / "benchmarks" / "results"
# all requests of a case are prefills that a graph may replay
OF_PREFILL = re.compile(r".+_(prefill_graph|several_requests|breakable_start)")
Row = dict[str, Any]
ByRelease = dict[str, dict[str, Any]]


def page() -> str:
    found: ByRelease = {release: {} for release in harm_page.RELEASES}
    for release, names in harm_page.recorded().items():
        for name, arms in sorted(names.items()):
            add_cpu(found[release], name, arms)
    newest = json.loads(REGISTRY.read_text())
    for name, graphs in of_registry(newest["architectures"]):
        graphs_of(found[newest["release"]], graphs, name)
    for release, name, answers in on_gpu():
        found[release].setdefault(served.GPU, {})[name] = answers
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def add_cpu(row: Row, name: str, arms: dict[str, Row]) -> None:
    if not {"stock", "patched"} <= set(arms) or ("error" in arms["stock"] and "error" in arms["patched"]):
        # such as a model that needs a GPU to be built
        return
    words = f"{answered(arms['stock'])}, {answered(arms['patched'])}"
    row.setdefault(served.CPU, {}).setdefault(words, []).append(name)
    if answered(arms["stock"]) == served.EAGER:
        graphs_of(row, served.NEVER, name)


def answered(row: Row) -> str:
    if "error" in row:
        return served.ENDS
    if not row["graphs"]:
        return served.EAGER
    return served.RIGHT if all(rules.difference(batch) <= rules.SAME for batch in row["batches"]) else served.WRONG


def graphs_of(row: Row, graphs: str, name: str) -> None:
    names = row.setdefault(served.GRAPHS, {}).setdefault(graphs, [])
    if name not in names:
        names.append(name)
        names.sort()


def of_registry(table: dict[str, Row]) -> Iterator[tuple[str, str]]:
    for name, row in sorted(table.items()):
        asked, default = row.get("asked for", ""), row.get("by default", "")
        # one that is made of another model has its graphs
        asked = table[asked].get("asked for", "") if asked in table else asked
        if asked.startswith(("refused", "never")):
            yield name, served.NEVER
        elif asked == "captured" and default == "breakable":
            yield name, served.BY_DEFAULT
        elif asked == "captured" and default.startswith("off"):
            yield name, served.IF_ASKED_FOR


def on_gpu() -> Iterator[tuple[str, str, list[int]]]:
    """Give each release and model the prefills of a case, and those that were right: stock's, and with the plugin."""
    of_case = {
        case.name: models.MODELS[case.model].architecture for case in cases.CASES if OF_PREFILL.fullmatch(case.name)
    }
    found: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for file in sorted(RESULTS.glob("verify*.json")):
        results = json.loads(file.read_text())
        for case, servers in by_case(results["servers"]):
            if case in of_case:
                best = found.setdefault((results["sglang"], of_case[case]), {})
                for arm, right in servers.items():
                    best[arm] = max(best.get(arm, right), right)
    for (release, name), arms in found.items():
        if {"stock", "patched"} <= set(arms):
            yield release, name, [arms["stock"][1], arms["stock"][0], arms["patched"][0]]


def by_case(servers: Iterable[Row]) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Of two servers of an arm the worse counts."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for server in servers:
        right = server["equal"], server["requests"]
        arms = found.setdefault(server["case"], {})
        arms[server["arm"]] = min(arms.get(server["arm"], right), right)
    yield from found.items()
