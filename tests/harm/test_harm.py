# SPDX-License-Identifier: Apache-2.0
"""No server is worse off with the plugin than without it: what was recorded of all, and a part of it made again."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes.planning import registry
from tests import processes, wheels
from tests.harm import exceptions, live, matrix, rules
from tests.harm.matrix import ADMITTED, INSIDE, OFF, PATCHED, STOCK

CHOSEN = live.chosen()
# captured from 0.5.22 on, and wrong there: kda_raw_beta
DELTA_ATTENTION = ("KimiLinearForCausalLM", "KimiK3LinearForCausalLM", "KimiK3ForConditionalGeneration")
RECORD = "run `make harm`, read what changed, and commit it"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_every_architecture_is_accounted_for(release: str) -> None:
    accounted = {*architectures.CONFIGURATIONS, *architectures.SAME_CODE, *architectures.NOT_RUN}
    new = sorted(matrix.names_in(release) - accounted)
    assert not new, f"cpu_sglang/architectures.py has no row for {', '.join(new)} of {release}"


def test_no_architecture_is_listed_for_nothing() -> None:
    known = set().union(*map(matrix.names_in, wheels.RELEASES))
    runs, same, not_run = (
        set(table) for table in (architectures.CONFIGURATIONS, architectures.SAME_CODE, architectures.NOT_RUN)
    )
    assert (runs | same | not_run) <= known
    assert not runs & same and not runs & not_run and not same & not_run
    assert set(architectures.SAME_CODE.values()) <= runs


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_what_counts_as_the_same_code_is(release: str) -> None:
    root, known = wheels.unpacked(release), matrix.names_in(release)
    for name, of in architectures.SAME_CODE.items():
        assert name not in known or matrix.code_of(root, name) == matrix.code_of(root, of), f"{name} is not {of}"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_every_row_is_recorded(release: str) -> None:
    rows = matrix.recorded(release)
    assert matrix.demanded(release) <= set(rows), RECORD
    assert {name for name, _ in rows} <= architectures.CONFIGURATIONS.keys() & matrix.names_in(release), RECORD
    outdated = [pair for pair, row in rows.items() if row["key"].split()[0] != matrix.key(pair[0], STOCK)]
    assert not outdated, f"made of another configuration; {RECORD}"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_no_recorded_server_is_worse_off_with_the_plugin(release: str) -> None:
    rows = matrix.recorded(release)
    for name in sorted({name for name, _ in rows}):
        refuse(release, name, rules.broken(rows[name, STOCK], rows[name, PATCHED]), rows[name, PATCHED])


def test_every_architecture_is_recorded_somewhere() -> None:
    found = {name for release in wheels.RELEASES for name, _ in matrix.recorded(release)}
    assert found == architectures.CONFIGURATIONS.keys(), RECORD


def refuse(release: str, name: str, broken: list[str], row: dict[str, Any]) -> None:
    unexcused = [rule for rule in broken if not exceptions.excuse(release, name, rule)]
    assert not unexcused, f"{release}, {name}: the patched server {' and '.join(unexcused)}: {row}"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_switched_off_the_plugin_changes_nothing(release: str) -> None:
    rows = matrix.recorded(release)
    for name in sorted(name for name, arm in rows if arm == OFF):
        assert rules.same(rows[name, STOCK], rows[name, OFF]), f"{release}, {name}"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_what_sglang_refuses_is_replayed_bit_by_bit_where_it_is_admitted(release: str) -> None:
    rows = matrix.recorded(release)
    admitted = {name: row for (name, arm), row in rows.items() if arm == ADMITTED}
    assert admitted.keys() == {name for name, _ in rows} & matrix.ADMITTED_ARCHITECTURES
    for name, row in admitted.items():
        refuse(release, name, rules.broken(rows[name, STOCK], row), row)
        layers = architectures.CONFIGURATIONS[name].config["num_hidden_layers"]
        assert not rows[name, STOCK]["graphs"] and not rows[name, PATCHED]["graphs"]
        assert row["graphs"] == {"16": [layers + 1, layers], "8": [layers + 1, layers]}
        assert row["batches"] == [[layers + 1, 0.0]] * 4, f"{release}, {name}"


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_with_our_kernels_a_graph_breaks_at_attention_only(release: str) -> None:
    rows = matrix.recorded(release)
    inside = {name: row for (name, arm), row in rows.items() if arm == INSIDE}
    assert inside.keys() == {name for name, _ in rows if INSIDE in matrix.wanted_arms(release, name)}
    for name, row in inside.items():
        breaks = matrix.BREAKS_OUTSIDE[name]
        assert row["graphs"] == {"16": [breaks + 1, breaks], "8": [breaks + 1, breaks]}, f"{release}, {name}"
        # 0.5.13 replays no model with images; what SGLang refuses is admitted here
        served = ADMITTED if name in matrix.ADMITTED_ARCHITECTURES else PATCHED
        replayed = [breaks + 1 if rules.replays(batch) else 0 for batch in rows[name, served]["batches"]]
        assert [replays for replays, _ in row["batches"]] == replayed
        assert max(map(rules.difference, row["batches"])) <= rules.SAME, f"{release}, {name}: {row['batches']}"


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
@pytest.mark.parametrize("name", DELTA_ATTENTION)
def test_delta_attention_is_recorded_inside_the_graph(release: str, name: str) -> None:
    rows = matrix.recorded(release)
    stock, patched = rows[name, STOCK], rows[name, PATCHED]
    # its backend decides so when it is built; the other layer's attention is the only break
    assert stock["graphs"] == patched["graphs"] == {"16": [2, 1], "8": [2, 1]}
    assert min(map(rules.difference, stock["batches"])) > 1
    assert max(map(rules.difference, patched["batches"])) < rules.SAME


@pytest.mark.parametrize("row", exceptions.EXCUSED, ids=lambda row: f"{row.fix} {row.rule}")
def test_an_exception_prevents_a_wrong_answer_that_is_shown(row: exceptions.Excused) -> None:
    assert row.fix in {fix.id for fix in registry.discover().fixes} and row.rule in rules.RULES
    used = [
        (release, name)
        for release in wheels.RELEASES
        for name in {name for name, _ in matrix.recorded(release)}
        if (rows := matrix.recorded(release))
        and row.rule in rules.broken(rows[name, STOCK], rows[name, PATCHED])
        and exceptions.excuse(release, name, row.rule) is row
    ]
    assert used, "nobody needs it"
    if row.shown_by == exceptions.STOCK_ROW:
        assert all(rules.is_wrong(matrix.recorded(release)[name, STOCK]) for release, name in used)
    else:
        file, _, test = row.shown_by.partition("::")
        assert re.search(rf"^def {test}\(", (processes.REPOSITORY / file).read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=sorted(CHOSEN))
def served_again(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[tuple[str, str]], matrix.Rows]:
    release = request.param
    # `--everything` has most architectures again in other releases
    chosen = live.chosen(live.LARGE_BUDGET) if request.config.getoption("--everything") else CHOSEN
    jobs = [matrix.job(*pair, is_recorded=False) for pair in chosen[release]]
    rows = matrix.served(release, jobs, tmp_path_factory.mktemp("rows") / "rows.jsonl")
    return release, chosen[release], {(row["architecture"], row["arm"]): row for row in rows}


def test_a_server_that_runs_here_is_not_worse_off_with_the_plugin(
    served_again: tuple[str, list[tuple[str, str]], matrix.Rows], tmp_path: pathlib.Path
) -> None:
    release, chosen, rows = served_again
    recorded = matrix.recorded(release)
    assert set(rows) == set(chosen)
    doubtful = [
        name for name, arm in rows if rules.broken(recorded[name, STOCK], rows[name, arm], rules.OTHER_PROCESSOR)
    ]
    # another processor may send a token to another expert: what stock answers, stock says here
    here = matrix.served(
        release, [matrix.job(name, STOCK, is_recorded=False) for name in doubtful], tmp_path / "rows.jsonl"
    )
    stock = {row["architecture"]: row for row in here} if doubtful else {}
    for (name, arm), row in rows.items():
        if name in stock:
            refuse(release, name, rules.broken(stock[name], row), row)
            assert rules.shape(stock[name]) == rules.shape(recorded[name, STOCK]), f"{release}, {name}: {RECORD}"
        assert rules.shape(row) == rules.shape(recorded[name, arm]), f"{release}, {name}, {arm}: {RECORD}"


def test_the_part_that_runs_has_every_release_and_what_is_demanded_of_all() -> None:
    assert set(CHOSEN) == set(wheels.RELEASES)
    runs = {name for pairs in CHOSEN.values() for name, _ in pairs}
    assert runs == matrix.IN_EVERY_RELEASE
