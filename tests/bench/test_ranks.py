# SPDX-License-Identifier: Apache-2.0
"""Servers that answer, that answer something else, and that end, as benchmarks/ranks.py tells of them."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import ranks, serving, serving_models
from sglang_bcg_fixes.lab.verify import environment
from tests import processes

Found = dict[tuple[str, str], dict[str, Any]]
Run = Callable[..., Found]


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))
    monkeypatch.setattr(serving, "LAUNCH", (sys.executable, "-m", "tests.bench.fake_http"))
    monkeypatch.setattr(serving_models, "main", lambda folder, name: None)
    monkeypatch.setattr(environment, "look", lambda python: {})

    def run(misbehaviour: str, *names: str) -> Found:
        monkeypatch.setenv("MISBEHAVIOUR", misbehaviour)
        file = tmp_path / "ranks.json"
        assert ranks.main(["--json", str(file), "--only", ",".join(names), "--folder", str(tmp_path / "logs")]) == 0
        return {(row["case"], row["arm"]): row for row in json.loads(file.read_text())["servers"]}

    return run


def test_answers_are_compared_with_those_without_prefill_graphs(run: Run) -> None:
    found = run("wrong", "two ranks", "data parallel attention", "returned experts")
    assert all(row["ending"] == "as asked" for row in found.values())
    assert found["two ranks", ranks.STOCK]["equal"] == "4 of 4"
    # the same tokens, less likely
    assert found["two ranks", ranks.OURS]["equal"] == "0 of 4"
    assert found["data parallel attention", ranks.OURS]["equal"] == "8 of 8"
    assert {share for _, share in found["returned experts", ranks.STOCK]["equal"]} == {1.0}
    assert {share for _, share in found["returned experts", ranks.OURS]["equal"]} == {0.75}


def test_a_server_that_ends_is_said_and_the_others_go_on(run: Run) -> None:
    found = run("ends", "LoRA")
    assert found["LoRA", ranks.STOCK]["ending"] == "as asked"
    ended = found["LoRA", ranks.OURS]
    assert ended["ending"].startswith("no answer to generate") and ended["exit"] == 3
    assert ended["status"][1].startswith("no running process reports")


def test_a_rank_that_is_not_there_cannot_be_killed(run: Run) -> None:
    found = run("", "a rank is killed")
    assert {row["ending"] for row in found.values()} == {"no process sglang::scheduler_TP1"}


def test_answers_before_those_of_the_reference_are_compared_with_nothing() -> None:
    (first, other) = ranks.judged(
        [
            {"case": "two ranks", "arm": ranks.REFERENCE, "found": [[[1], -1.0]] * 4},
            {"case": "returned experts", "arm": ranks.OURS, "found": [["rank 0, 29 tokens", "AAAA"]] * 4},
        ]
    )
    assert (first["equal"], other["found"]) == ("4 of 4", 4)


def test_an_unknown_case_names_the_nearest() -> None:
    with pytest.raises(SystemExit, match="did you mean two ranks"):
        ranks.main(["--json", "ranks.json", "--only", "two rank"])
