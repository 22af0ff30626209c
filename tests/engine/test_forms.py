# SPDX-License-Identifier: Apache-2.0
"""A new release changes tables and no fix: what nobody has read is shown, and written down after a yes."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import pathlib
import shutil
import sys
from types import ModuleType
from typing import Any

import pytest

from sglang_bcg_fixes.source import forms
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes, wheels
from tests.mutated import rewritten

LAST, NEWEST = wheels.RELEASES[-2:]
NEW = "0.5.99"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forms_tool", processes.REPOSITORY / "tools" / "forms.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = tool()


@pytest.fixture
def project(tmp_path: pathlib.Path) -> Any:
    """The files that name releases, as they were before the newest."""
    made = TOOL.Project(tmp_path / "releases.txt", tmp_path / "forms.json", tmp_path / "verdicts.json")
    made.releases.write_text("".join(f"{name}\n" for name in wheels.RELEASES[:-1]))
    table = forms.load()
    for of in table.values():
        for form in [form for form, known in of.items() if known["releases"] == [NEWEST]]:
            del of[form]
        for known in of.values():
            known["releases"] = [name for name in known["releases"] if name != NEWEST]
    TOOL.dump({where: of for where, of in table.items() if of}, made.forms)
    rows = json.loads(TOOL.HERE.verdicts.read_text())
    del rows[NEWEST]
    made.verdicts.write_text(json.dumps(rows))
    return made


def source(release: str) -> Source:
    return Source(Folder(wheels.unpacked(release)), release)


def take_in(project: Any, new: Source, yes: bool = True) -> int:
    code: int = TOOL.take_in(NEW, new, source(LAST), project, yes)
    return code


def test_the_newest_release_under_another_name_is_taken_in_without_a_fix_file(
    project: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in (processes.REPOSITORY / "sglang_bcg_fixes").rglob("*.py")}
    assert take_in(project, source(NEWEST)) == 0
    printed = capsys.readouterr().out
    expected = forms.load()
    for of in expected.values():
        for known in of.values():
            known["releases"] = [NEW if name == NEWEST else name for name in known["releases"]]
    assert forms.load(project.forms) == expected
    assert json.loads(project.verdicts.read_text())[NEW] == json.loads(TOOL.HERE.verdicts.read_text())[NEWEST]
    assert project.known_releases() == [*wheels.RELEASES[:-1], NEW]
    assert {file: file.read_bytes() for file in before} == before
    # what it has that the one before has not is shown as a difference
    alone = {form for of in forms.load().values() for form, known in of.items() if known["releases"] == [NEWEST]}
    assert alone and all(f"[{form}]" in printed for form in alone) and "--- before" in printed


def test_nothing_is_written_without_a_yes(
    project: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in vars(project).values()}
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert take_in(project, source(NEWEST), yes=False) == 1
    assert f"tools/forms.py release {NEW} --yes" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in before} == before


def test_a_definition_that_is_gone_is_said_and_its_fix_stays_unknown(
    project: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "sglang/srt/models/falcon_h1.py"
    files = rewritten(
        wheels.unpacked(NEWEST), path, "class FalconH1HybridAttentionDecoderLayer", "class AnotherDecoderLayer"
    )
    assert take_in(project, Source(files)) == 0
    printed = capsys.readouterr().out
    assert "The code that these read is missing" in printed and "ssm_mixer_captured: affected in" in printed
    assert json.loads(project.verdicts.read_text())[NEW]["ssm_mixer_captured"] == "unknown"


def test_what_a_new_fix_reads_is_added_for_it_alone(project: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(forms.FILE, project.forms)
    table = forms.load()
    for of in table.values():
        for known in of.values():
            known["read_for"] = [name for name in known["read_for"] if name != "no_bucket_fits"]
    without = {where: {form: known for form, known in of.items() if known["read_for"]} for where, of in table.items()}
    TOOL.dump({where: of for where, of in without.items() if of}, project.forms)
    sources = {release: source(release) for release in wheels.RELEASES}
    whole = dataclasses.replace(project, releases=TOOL.HERE.releases)
    assert TOOL.read_for("no_bucket_fits", sources, whole, True) == 0
    assert "read by no_bucket_fits" in capsys.readouterr().out
    assert forms.load(project.forms) == forms.load()
    assert TOOL.read_for("no_bucket_fits", sources, dataclasses.replace(whole, forms=forms.FILE), False) == 0
    assert "Every form that it reads has been read." in capsys.readouterr().out


def test_what_a_probe_has_left_is_forgotten_and_no_yes_is_needed(
    project: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    table = forms.load()
    # of its own; of another fix, with one more release; and one of both, with one release less
    table["sglang.srt.left:behind"] = {"000000000000": {"releases": [NEWEST], "read_for": ["no_bucket_fits"]}}
    others = next(
        known for of in table.values() for known in of.values() if "eager_runner_cannot_vote" in known["read_for"]
    )
    assert "no_bucket_fits" not in others["read_for"] and wheels.RELEASES[0] not in others["releases"]
    others["read_for"] = sorted([*others["read_for"], "no_bucket_fits"])
    others["releases"] = [wheels.RELEASES[0], *others["releases"]]
    mine = next(known for of in table.values() for known in of.values() if known["read_for"] == ["no_bucket_fits"])
    del mine["releases"][0]
    TOOL.dump(table, project.forms)
    sources = {release: source(release) for release in wheels.RELEASES}
    whole = dataclasses.replace(project, releases=TOOL.HERE.releases)
    assert TOOL.read_for("no_bucket_fits", sources, whole, False) == 0
    assert capsys.readouterr().out.count("no longer read: ") == 2
    assert forms.load(project.forms) == forms.load()
