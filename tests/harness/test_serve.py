# SPDX-License-Identifier: Apache-2.0
"""`make serve`: once for real, and every way in which it must fail, with servers that do just that."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import serve
import serve_install
import serve_server
import tiny_model

from tests import processes

SAYS_WHAT_IT_APPLIED = "bcg-fixes 0.1.0: sglang 0.0.0 AForCausalLM TP0: 1 fix live, 0 unread, 0 lost; kernel none"

STUBBORN_SERVER = ("-m", "tests.scenarios.stubborn_server")

Start = Callable[..., serve_server.Server]
Installed = tuple[pathlib.Path, list[str]]


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(serve_server, "SECONDS_TO_END", 1)
    started = []

    def start(*arguments: object, port: int = 1) -> serve_server.Server:
        command = [sys.executable, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(processes.REPOSITORY)}
        started.append(serve_server.Server(command, environment, tmp_path, f"http://127.0.0.1:{port}"))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def answering(start: Start) -> Start:
    def answering(log_line: str = "", ids: object = tuple(range(8)), status: int = 200) -> serve_server.Server:
        port = serve.free_port()
        arguments = ("-m", "tests.scenarios.completion_server", port, log_line, json.dumps(ids), status)
        return start(*arguments, port=port)

    return answering


def show(server: serve_server.Server) -> int:
    return serve.show(server, "0.0.0", {"SGLANG_PLUGINS": "bcg_fixes"}, {"ONESHOT": "1", "START_LIMIT_S": "30"})


@pytest.mark.parametrize("line", [SAYS_WHAT_IT_APPLIED, "bcg-fixes 0.1.0: sglang 0.0.0 Llama TP0: 4 fixes live"])
def test_a_completion_and_the_plugin_line_are_success(
    line: str, answering: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    assert show(answering(line)) == 0
    *progress, healthy, completion, said = capfd.readouterr().out.splitlines()
    assert all(text.startswith("waiting for the server") for text in progress)
    assert re.match(r"SGLang 0\.0\.0 is healthy after \d+ s on http://\S+; its log is ", healthy)
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in completion
    assert said == line


def test_a_missing_plugin_line_is_failure(answering: Start) -> None:
    # sglang itself prints this much about a plugin that it could not load
    server = answering("Failed to load plugin bcg_fixes from group sglang.srt.plugins")
    with pytest.raises(serve_server.ServeError, match="plugin said nothing") as caught:
        show(server)
    assert "Failed to load plugin" in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "status", "said"),
    [([1, 2], 200, "without the 8 output ids"), (None, 200, "without the 8 output ids"), ([], 500, "HTTP status 500")],
)
def test_an_answer_that_is_no_completion_is_failure(answering: Start, ids: object, status: int, said: str) -> None:
    with pytest.raises(serve_server.ServeError, match=said):
        show(answering(SAYS_WHAT_IT_APPLIED, ids, status))


def test_a_server_that_dies_shows_the_end_of_its_log(start: Start) -> None:
    server = start("-c", "import sys; print(*range(100), sep='\\n'); sys.exit('no such model')")
    with pytest.raises(serve_server.ServeError, match="ended with exit status 1") as caught:
        server.wait_until_healthy(30)
    message = str(caught.value)
    assert message.index("| 99") < message.index("| no such model") < message.index("Next: ")
    assert "| 10\n" not in message, "the whole log was shown instead of its end"
    assert str(server.log) in message


def test_a_server_that_is_killed_names_the_signal(start: Start) -> None:
    server = start("-c", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(serve_server.ServeError, match="ended by signal 9"):
        server.wait_until_healthy(30)


def test_a_server_that_hangs_is_ended_at_the_limit_with_all_its_processes(start: Start) -> None:
    server = start(*STUBBORN_SERVER)
    began = time.monotonic()
    with pytest.raises(serve_server.ServeError, match=r"did not answer .* within 2 s") as caught:
        server.wait_until_healthy(2)
    assert "loading the weights" in str(caught.value)
    assert "deaf" in server.lines(), "the child was not yet deaf to a polite end, so this shows nothing"
    server.stop()
    assert time.monotonic() - began < 10
    assert not serve_server.is_running(server.process.pid)


def test_progress_is_shown_while_waiting(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(*STUBBORN_SERVER)
    with pytest.raises(serve_server.ServeError):
        server.wait_until_healthy(0.5)
    assert "waiting for the server: " in capsys.readouterr().out


def test_an_end_from_outside_ends_the_server_too(tmp_path: pathlib.Path) -> None:
    """Send SIGTERM to `make serve` alone, as CI does at its time limit."""
    path = os.pathsep.join(map(str, [processes.REPOSITORY, processes.REPOSITORY / "tools"]))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    log = tmp_path / "sglang-bcg-fixes" / "serve" / "server.log"
    command = [sys.executable, "-m", "tests.scenarios.serve_endlessly"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline and process.poll() is None, "the server was never started"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert "interrupted" in process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert not serve_server.is_running(int(log.read_text()))


def test_an_unknown_release_lists_the_known_ones() -> None:
    with pytest.raises(serve_server.ServeError, match=r"RELEASE=0\.5\.10 .*Next: choose one of 0\.5\.11, "):
        serve.check("0.5.10")


@pytest.mark.parametrize("release", serve_install.RELEASES)
def test_the_release_knows_every_argument(release: str, release_root: Callable[[str], pathlib.Path]) -> None:
    srt = release_root(release) / "sglang" / "srt"
    known = "".join(file.read_text() for file in [srt / "server_args.py", *sorted((srt / "arg_groups").glob("*.py"))])
    groups = (serve.ARGUMENTS, serve.ARGUMENTS_ON_CPU, serve.ARGUMENTS_ON_GPU, serve.graph_arguments(release))
    flags = [argument.partition("=")[0].removeprefix("--") for group in groups for argument in group]
    assert [flag for flag in flags if flag not in known and flag.replace("-", "_") not in known] == []


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """An environment's folder, and what was installed into it."""
    steps: list[str] = []

    def create(folder: pathlib.Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        (folder / "bin" / "pip").touch()

    monkeypatch.setattr(serve_install, "create", create)
    monkeypatch.setattr(serve_install, "pip", lambda python, what, *_, **__: steps.append(what))
    return tmp_path / "venv", steps


def test_what_is_installed_is_not_installed_again(installed: Installed) -> None:
    folder, steps = installed
    serve_install.prepare(folder, "0.5.12", on_gpu=False)
    assert "sglang 0.5.12" in steps and "the plugin, from this checkout" in steps
    steps.clear()
    serve_install.prepare(folder, "0.5.12", on_gpu=False)
    assert steps == []
    serve_install.prepare(folder, "0.5.13", on_gpu=False)
    assert "sglang 0.5.13" in steps


def test_on_a_cpu_pip_installs_the_list_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    monkeypatch.setattr(subprocess, "run", run)
    python = serve_install.prepare(tmp_path, "0.5.12", on_gpu=False)
    assert python == tmp_path / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    assert commands == [
        [*install, f"torch=={pinned()['torch']}"],
        [*install, "--no-deps", "--requirement", str(processes.REPOSITORY / "cpu_sglang" / "requirements.txt")],
        [*install, "--no-deps", "sglang==0.5.12"],
        [*install, "--editable", str(processes.REPOSITORY)],
    ]


def test_an_interrupted_installation_does_not_pass_for_a_whole_one(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = installed
    serve_install.prepare(folder, "0.5.12", on_gpu=False)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_install, "install_on_cpu", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve_install.prepare(folder, "0.5.13", on_gpu=False)
    assert not (folder / serve_install.STAMP).exists()


@pytest.mark.parametrize(
    ("said", "next_step"),
    [
        ("ERROR: No matching distribution found for sglang==9", "Next: add PYTHON=python3.11."),
        ("ERROR: No space left on device", "Next: repair that, then the same command."),
        (
            "WARNING: Retrying (NewConnectionError('no route'))\nERROR: No matching distribution found",
            "Next: connect, ",
        ),
    ],
)
def test_a_failing_pip_is_a_sentence_and_a_next_step(
    said: str,
    next_step: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\ncat <<'END'\nCollecting something\n{said}\nEND\nexit 1\n")
    pip.chmod(0o755)
    with pytest.raises(serve_server.ServeError, match=re.escape(next_step)) as caught:
        serve_install.pip(pip, "sglang 9", "sglang==9")
    assert "sglang 9" in str(caught.value) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == "installing sglang 9 ...\n", "pip is not quiet"


def test_without_a_network_pip_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a port on which nobody listens, with pip itself."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(serve_server.ServeError, match=r"pip reached no package index for x\. Next: connect"):
        serve_install.pip(pathlib.Path(sys.executable), "x", "--target", str(tmp_path), "no-such-package-of-bcg-fixes")


def test_an_old_python_is_a_sentence_and_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    with pytest.raises(serve_server.ServeError, match=r"Next: add PYTHON=python3\.11 to your command\."):
        serve_install.check_python()


def test_every_constraint_file_belongs_to_a_known_release() -> None:
    assert {file.stem for file in serve_install.CONSTRAINTS.glob("*.txt")} <= set(serve_install.RELEASES)


def test_the_model_is_a_whole_safetensors_file(tmp_path: pathlib.Path) -> None:
    tiny_model.write(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert tensors[-1]["data_offsets"][1] == len(content) - 8 - length
    assert all(after["data_offsets"][0] == before["data_offsets"][1] for before, after in itertools.pairwise(tensors))
    written = (tmp_path / "model.safetensors").stat().st_mtime_ns
    tiny_model.write(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == written


def pinned() -> dict[str, str]:
    """The version of each package that SGLang needs on a CPU."""
    lines = serve_install.REQUIREMENTS_ON_CPU.read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, version in pairs}


def link_packages(folder: pathlib.Path) -> None:
    """Put what is pinned, and nothing else, into an environment: links to what the tests have from the same list."""
    [packages] = folder.glob("lib/python*/site-packages")
    for name, version in pinned().items():
        distribution = importlib.metadata.distribution(name)
        # pip would put the right one in the place of another, through the links
        assert distribution.version.partition("+")[0] == version, f"{name} is old: make .venv-test/ready"
        for entry in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(str(distribution.locate_file(entry)))


def test_make_serve(tmp_path: pathlib.Path, everything: bool) -> None:
    """Serve in an environment with links to the tests' packages, or in BCG_FIXES_VENV or .venv, installed first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "XDG", "PYTHON"))}
    environment = {**inherited, "ONESHOT": "1", "XDG_CACHE_HOME": str(tmp_path)}
    # with a GPU, pip would write the versions that SGLang pins through the links
    if not everything and shutil.which("nvidia-smi") is None:
        folder = tmp_path / "venv"
        serve_install.create(folder)
        link_packages(folder)
        environment["BCG_FIXES_VENV"] = str(folder)
    # not the cache's folder: what processes report must be private
    environment["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
    command = [sys.executable, str(serve_install.REPOSITORY / "tools" / "serve.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    log = (tmp_path / "sglang-bcg-fixes" / "serve" / "server.log").read_text()
    assert "Failed to load plugin" not in log and "Failed to execute general plugin" not in log
    assert "completion ids [" in ran.stdout
    results = [line for line in ran.stdout.splitlines() if not re.match(r"creating |installing |waiting ", line)]
    assert len(results) == 3 and max(map(len, results[1:])) <= serve.LONGEST, ran.stdout
    # the scheduler is the process that runs the model
    said = [line for line in log.splitlines() if serve.PLUGIN_LINE.search(line)][-1]
    assert results[-1].removesuffix(" ...") in said
    assert ", 0 unread, 0 lost; " in said and "failed" not in said, said
