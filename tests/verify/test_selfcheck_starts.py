# SPDX-License-Identifier: Apache-2.0
"""benchmarks/selfcheck_starts.py, with servers that say just what it must notice."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import selfcheck_starts
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import releases
from tests import wheels
from tests.verify.test_command import RELEASE, here, verify

__all__ = ["here", "verify"]


@pytest.mark.parametrize(("said", "status"), [("right", 0), ("wrong", 1), ("not checked", 1), ("", 1)])
def test_a_start_with_fixes_that_is_not_right_is_red(
    here: dict[str, object],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    status: int,
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: releases.in_folder(wheels.unpacked(RELEASE)))
    monkeypatch.setenv("PATCHED_SAYS", said)
    file = tmp_path / "found.json"
    assert selfcheck_starts.main(["--starts", "3", "--jobs", "4", "--json", str(file)]) == status
    servers = json.loads(file.read_text())["servers"]
    assert [row["arm"] for row in servers] == ["patched"] * 3 + ["checked"]
    assert {row["verdict"] for row in servers[:3]} == {"red" if status else "green"}
    assert servers[3]["verdict"] == "for information" and "it was noticed" in servers[3]["why"]
    printed = capsys.readouterr().out
    assert f"patched: 3 starts; 3 {said or 'no self-check'}\n" in printed
    assert "checked: 1 starts; 1 wrong\n" in printed


def test_cases_are_chosen_by_name(
    here: dict[str, object], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "installed", lambda: releases.in_folder(wheels.unpacked(RELEASE)))
    with pytest.raises(SystemExit, match=f"--case gpt_oss_decode_padding: none of {RELEASE} with prefill graphs"):
        selfcheck_starts.main(["--case", "gpt_oss_decode_padding", "--json", str(tmp_path / "none.json")])
    monkeypatch.setenv("PATCHED_SAYS", "right")
    file = tmp_path / "found.json"
    asked = ["--case", "a_case", "--starts", "1", "--jobs", "1", "--json", str(file)]
    assert selfcheck_starts.main(asked) == 0
    assert {row["case"] for row in json.loads(file.read_text())["servers"]} == {"a_case"}


def test_a_model_of_bench_starts_with_the_fix_that_gives_it_graphs(tmp_path: pathlib.Path) -> None:
    known, source = registry.discover(), releases.in_folder(wheels.unpacked(RELEASE))
    (granite,) = selfcheck_starts.chosen_of(["granite_4_h_micro"], known, source)
    runs = list(selfcheck_starts.runs_of([granite], 1, known, source, tmp_path))
    flag = registry.declared_in(hybrids_without_graphs).flag
    assert [run.server.environment.get(flag) for run in runs] == ["on", None]
    assert [run.server.job["calls"] for run in runs] == [[], []]
    assert runs[0].server.job["engine"]["model_path"].endswith("/models/granite_4_h_micro")
