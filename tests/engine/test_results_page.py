# SPDX-License-Identifier: Apache-2.0
"""The page of recorded results, from benchmarks/results/runs.toml and the files themselves."""

from __future__ import annotations

import pathlib

import kernel_times_page
import pytest
import results_page


def test_every_file_belongs_to_one_run_and_says_when_and_on_what() -> None:
    mine = [name for _, _, names in results_page.assigned() for name in names]
    assert sorted(mine) == results_page.files()
    silent = {name for name in mine if name.endswith((".json", ".jsonl")) and not results_page.made(name)}
    assert silent == set()
    assert results_page.made("verify-0.5.22.json") == "0.5.22, H200, 2026-11-29, cbd6851d87c3"


@pytest.mark.parametrize(("files", "said"), [("['a*']", "does not say how to make b.json"), ("['*', 'c']", "")])
def test_a_file_that_no_run_names_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, files: str, said: str
) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    for name in ("FOLDER", "PAGE", "RUNS"):
        place = {"PAGE": "README.md", "RUNS": "runs.toml"}.get(name, "")
        monkeypatch.setattr(results_page, name, tmp_path / place)
    monkeypatch.setattr(kernel_times_page, "RESULTS", tmp_path)
    results_page.RUNS.write_text(f'[[Answers]]\nfiles = {files}\nrun = "make FILE"\nnote = "Twice."\n')
    if said:
        with pytest.raises(SystemExit, match=said):
            results_page.page()
    else:
        assert "- `make FILE`<br>Twice.\n  - [a.json](a.json)\n  - [b.json](b.json)\n" in results_page.page()


def test_a_run_without_files_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(results_page, "RUNS", tmp_path / "runs.toml")
    results_page.RUNS.write_text('[[Answers]]\nfiles = ["no such file"]\nrun = "make FILE"\n')
    with pytest.raises(SystemExit, match="Answers: no file is left for"):
        list(results_page.assigned())
