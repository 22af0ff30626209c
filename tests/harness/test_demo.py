# SPDX-License-Identifier: Apache-2.0
"""`make demo` with the unpacked release: what it shows, and when its exit status must not be 0."""

from __future__ import annotations

import copy
import importlib.util
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import demo
import pytest
import serve_install
import serve_server

from sglang_bcg_fixes.lab.verify import cases

TOKENS = 6 * demo.STEPS
RED, GREEN = "\033[31;1m", "\033[32m"


@pytest.fixture(scope="module")
def root(release_root: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return release_root(demo.RELEASE)


@pytest.fixture
def prepared(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The release and this environment stand for what would be installed."""
    of_runs = demo.environment_of_runs

    def with_release(environ: dict[str, str]) -> dict[str, str]:
        environment = of_runs(environ)
        return environment | {"PYTHONPATH": f"{root}{os.pathsep}{environment['PYTHONPATH']}"}

    monkeypatch.setattr(serve_install, "prepare", lambda *_, **__: pathlib.Path(sys.executable))
    monkeypatch.setattr(demo, "environment_of_runs", with_release)
    return root


def run(tmp_path: pathlib.Path, **environ: str) -> int:
    """Run the demo as a user would who has set variables of the plugin."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    return demo.demo({**inherited, "XDG_CACHE_HOME": str(tmp_path), "SGLANG_BCG_FIXES": "off", **environ})


@pytest.fixture(scope="module")
def report(root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = demo.environment_of_runs(os.environ)
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment['PYTHONPATH']}"
    return demo.measure(pathlib.Path(sys.executable), environment, tmp_path_factory.mktemp("demo"))


def test_stock_is_wrong_and_the_plugin_right(report: dict[str, Any]) -> None:
    assert demo.judge(report) == ""
    falcon, phi = (report["models"][model] for model in demo.MODELS)
    stock = falcon["arms"]["stock"]
    assert stock["kept"]["tokens"] != falcon["eager"] and stock["kept"]["max_abs_logit_difference"] > 1
    assert "illegal memory access" in stock["reused"]["error"]
    assert "has no attribute 'flatten'" in phi["arms"]["stock"]["kept"]["error"]
    assert all(model["arms"]["plugin"]["reused"]["replays"] for model in (falcon, phi))


def test_one_command_shows_it(
    prepared: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    assert run(tmp_path, PICTURE=str(picture)) == 0
    printed = capsys.readouterr().out
    assert "\033" not in printed, "colour in a pipe"
    assert f"picture: {picture} " in printed and "a CPU's model of CUDA graphs" in printed and "memory kept" in printed
    assert printed.splitlines()[-1] == demo.NEXT
    assert len(re.findall(r"<use ", picture.read_text())) == len(demo.MODELS) * len(demo.COLUMNS) * TOKENS


@pytest.mark.parametrize(
    ("arm", "variables", "said"),
    [
        ("plugin", {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "off"}, "Falcon-H1: SGLang with the plugin is"),
        ("stock", {"SGLANG_PLUGINS": "bcg_fixes"}, "Falcon-H1: the stock run had the plugin, so it shows nothing."),
    ],
)
def test_arms_that_are_not_what_they_are_called_are_failure(
    arm: str,
    variables: dict[str, str],
    said: str,
    prepared: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "ARMS", demo.ARMS | {arm: variables})
    assert run(tmp_path) == 1
    assert said in capsys.readouterr().out


def changed(report: dict[str, Any], model: str, arm: str, **change: object) -> dict[str, Any]:
    other = copy.deepcopy(report)
    other["models"][model]["arms"][arm].update(change)
    return other


@pytest.mark.parametrize("model", demo.MODELS)
def test_each_way_to_show_nothing_is_named(report: dict[str, Any], model: str) -> None:
    right = report["models"][model]["arms"]["plugin"]["kept"]
    one_wrong = [[*right["tokens"][0][:-1], 1], *right["tokens"][1:]]
    for arm, change, said in (
        ("stock", {"kept": right}, "stock is right"),
        ("stock", {"with_plugin": True}, "the stock run had the plugin"),
        ("plugin", {"with_plugin": False}, "did not load the plugin"),
        ("plugin", {"kept": {**right, "tokens": one_wrong}}, "with the plugin is wrong (memory kept)"),
        ("plugin", {"reused": {**right, "max_abs_logit_difference": 1e-6}}, "with the plugin is wrong (memory reused)"),
        ("plugin", {"reused": {"error": "no memory"}}, "with the plugin ends (memory reused): no memory"),
        ("plugin", {"kept": {**right, "replays": 0}}, "replayed no graph"),
    ):
        assert said in demo.judge(changed(report, model, arm, **change)), change


def test_each_token_has_a_square_and_a_colour(report: dict[str, Any]) -> None:
    rows = list(demo.rows_of(report))
    states = [token.state for row in rows for tokens in row.tokens.values() for token in tokens]
    falcon = report["models"]["falcon_h1"]
    wrong = sum(
        token != right
        for answered, eager in zip(falcon["arms"]["stock"]["kept"]["tokens"], falcon["eager"], strict=True)
        for token, right in zip(answered, eager, strict=True)
    )
    assert len(states) == len(demo.MODELS) * len(demo.COLUMNS) * TOKENS
    assert states.count(demo.DIFFERS) == wrong > 0 and states.count(demo.MISSING) == TOKENS
    picture = demo.drawn(rows, report["release"])
    assert len(picture) < 15_000
    for state in (demo.EQUAL, demo.DIFFERS, demo.MISSING):
        assert picture.count(f'<use href="#{state}"') == states.count(state)
    shown = demo.table(rows, report, colour=True)
    assert shown.count(RED) == wrong + TOKENS and shown.count(GREEN) == states.count(demo.EQUAL)
    plain = demo.table(rows, report, colour=False)
    assert plain == re.sub(r" +$", "", re.sub(r"\033\[[\d;]*m", "", shown), flags=re.MULTILINE)
    # and the sentence on it
    assert plain.count("*") == wrong + 1


def test_the_recorded_picture_is_the_program_s(report: dict[str, Any]) -> None:
    recorded = serve_install.REPOSITORY / "docs" / "demo.svg"
    now = demo.drawn(list(demo.rows_of(report)), report["release"])
    assert recorded.read_text() == now, "make demo PICTURE=docs/demo.svg"


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_a_terminal_has_colour_where_it_is_wanted(environ: dict[str, str], coloured: bool) -> None:
    read, write = pty.openpty()
    program = "import os, demo; print(demo.wants_colour(os.environ))"
    environment = {"PYTHONPATH": str(serve_install.REPOSITORY / "tools"), "TERM": "xterm", **environ}
    subprocess.run([sys.executable, "-c", program], stdout=write, env=environment, check=True)
    assert os.read(read, 100).decode().strip() == str(coloured)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("has_sglang", "status"), [(True, 0), (True, 1), (False, 0)])
def test_with_a_gpu_real_servers_of_the_same_models_run_where_an_sglang_is_installed(
    prepared: pathlib.Path,
    report: dict[str, Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    has_sglang: bool,
    status: int,
) -> None:
    monkeypatch.setattr(demo, "measure", lambda *_: report)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if has_sglang else None)
    program = f"import os, sys; print('verified', os.getcwd(), *sys.argv[1:]); sys.exit({status})"
    monkeypatch.setattr(demo, "VERIFY", (sys.executable, "-c", program))
    assert run(tmp_path) == status
    said = capfd.readouterr().out
    ran = f"verified {serve_install.REPOSITORY} {' '.join(demo.CASES)}\n"
    assert (ran in said) is has_sglang and (f"bcg-fixes verify {' '.join(demo.CASES)}\n" in said) is not has_sglang, (
        said
    )
    assert ("`verify` ended with exit status 1" in said) is bool(status)


def test_the_cases_of_the_demo_are_those_of_verify() -> None:
    named = demo.CASES[1::2]
    assert len(named) == len(demo.MODELS) and set(named) <= {case.name for case in cases.CASES}


def test_a_picture_that_cannot_be_written_has_a_next_step(
    prepared: pathlib.Path, report: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "measure", lambda *_: report)
    with pytest.raises(serve_server.ServeError, match=r"Next: name another file, PICTURE=FILE\."):
        run(tmp_path, PICTURE=str(tmp_path / "no" / "folder.svg"))


def test_runs_that_end_early_name_their_log(tmp_path: pathlib.Path) -> None:
    # this Python finds no SGLang
    with pytest.raises(serve_server.ServeError, match=r"No module named 'sglang'.*Next: read .*demo\.log\."):
        demo.measure(pathlib.Path(sys.executable), demo.environment_of_runs(os.environ), tmp_path)


def test_an_old_python_is_one_sentence(tmp_path: pathlib.Path) -> None:
    program = "import sys; sys.version_info = (3, 9, 1); import demo; sys.exit(demo.run('make demo', demo.demo))"
    environment = {**os.environ, "PYTHONPATH": str(serve_install.REPOSITORY / "tools"), "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout == ""
    assert re.fullmatch(r"make demo: this is Python \S+\. Next: add PYTHON=python3\.11 to your command\.\n", ran.stderr)
