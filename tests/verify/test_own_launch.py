# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify -- COMMAND` with servers that do just what it must notice."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from cpu_sglang import ranks
from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.lab.verify.own import arms as own_arms
from sglang_bcg_fixes.lab.verify.own import ask, command, compare, prompts, server
from sglang_bcg_fixes.source import releases
from tests import processes, wheels

RELEASE = "0.5.12.post1"
# of the process that a hanging server starts
SLEEPS = 997
SERVER = str(processes.REPOSITORY / "tests" / "verify" / "own_server.py")
Verify = Callable[..., tuple[int, str]]
Arms = Callable[[], dict[str, dict[str, object]]]
# to parse a release takes longer than all that the servers here do
in_folder_once = functools.cache(releases.in_folder)


@pytest.fixture
def port() -> int:
    return ranks.free_port()


@pytest.fixture
def verify(
    port: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Verify:
    source = in_folder_once(wheels.unpacked(RELEASE))
    monkeypatch.setattr(releases, "installed", lambda: source)
    monkeypatch.setattr(server, "SECONDS_BETWEEN_LOOKS", 0.02)
    for name in [name for name in os.environ if name.startswith("SGLANG")]:
        monkeypatch.delenv(name)

    def verify(*words: str, misbehaviour: str = "", command: str = "") -> tuple[int, str]:
        typed = [f"MISBEHAVIOUR={misbehaviour}", sys.executable, SERVER, "--port", str(port), *command.split()]
        json_file = str(tmp_path / "found.json")
        words = ("--json", json_file, "--folder", str(tmp_path / "runs"), "--start-limit", "20", *words)
        status = main.main(["verify", *words, "--", *typed])
        said = capsys.readouterr()
        return status, said.out + said.err

    return verify


@pytest.fixture
def arms(tmp_path: pathlib.Path) -> Arms:
    return lambda: json.loads((tmp_path / "found.json").read_text())["arms"]


def counts(arms: Arms, state: str) -> list[object]:
    return [arm["counts"][state] for arm in arms().values()]  # type: ignore[index]


def test_a_right_server_is_equal_in_every_arm(verify: Verify, arms: Arms, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "pages" / "found.html"
    status, said = verify("--page", str(page))
    # the lengths around 4, 8, 16 and 32, in four ways
    assert (status, counts(arms, "equal")) == (0, [48] * 4), said
    assert "with the fixes no request differs from the server without replays; in stock none differs" in said
    assert "with the fixes 1 are applied; --json FILE names them\n" in said and arms()["fixes"]["applied"] == ["a_fix"]
    assert [arm["replays"] for arm in arms().values()] == [0, 1, 0, 0]
    assert page.read_text().count("<rect") == 48 * 4 + len(compare.STATES)
    assert page.read_text().count("finished; first token after ") == 4 and "<h1>With the fixes" in page.read_text()


@pytest.mark.parametrize(
    ("misbehaviour", "status", "verdict"),
    [
        ("stock=wrong tokens", 0, "with the fixes no request differs from the server without replays; in stock 6"),
        ("fixes=wrong tokens", 1, "with the fixes 6 requests differ, and not in stock"),
        ("fixes=wrong logprobs", 1, "with the fixes 3 requests differ, and not in stock"),
        ("fixes=not a number", 1, "with the fixes 3 requests differ, and not in stock"),
        ("stock=wrong tokens,fixes=wrong tokens", 0, "with the fixes 6 requests differ, in stock, too"),
        ("stock=wrong logprobs,fixes=wrong tokens", 1, "with the fixes 3 requests differ, and not in stock"),
        ("fixes=rounds", 0, "with the fixes no request differs"),
        ("fixes=ties", 0, "with the fixes no request differs"),
        ("stock=dies at start", 0, "stock does not finish"),
        (
            "stock=dies at start,fixes=wrong tokens",
            0,
            "with the fixes 6 requests differ from the server without replays; stock does not finish",
        ),
        ("fixes=dies at start", 1, "the server does not finish with the fixes, and stock does"),
        ("fixes=dies", 1, "the server does not finish with the fixes, and stock does"),
        ("stock=dies,fixes=dies", 1, "the server does not finish with the fixes, and neither does stock"),
        ("eager=dies", 2, "the server without replays did not finish, so there is nothing to compare with"),
        ("stock=dies at start,fixes=dies at start,eager=dies at start", 2, "no server answered, with the fixes and"),
        ("fixes=has no plugin", 2, "no process of fixes had the plugin"),
        ("eager=replays the other way", 2, "the server that refuses replays made 1 of them"),
        ("fixes=replays the other way", 2, "no graph was replayed with the fixes"),
        ("stock=refuses all,fixes=refuses all,eager=refuses all", 2, "no request was answered"),
        ("stock=refuses one,fixes=refuses one,eager=refuses one", 0, "with the fixes no request differs"),
        ("fixes=refuses one,eager=refuses one", 1, "with the fixes 3 requests differ, and not in stock"),
    ],
)
def test_what_goes_wrong_has_a_verdict_and_an_exit_status(
    verify: Verify, misbehaviour: str, status: int, verdict: str
) -> None:
    found, said = verify(misbehaviour=misbehaviour)
    assert found == status and verdict in said, said


@pytest.mark.parametrize(
    ("dead", "status", "said"),
    [
        ((), 1, "with the fixes 1 request differs, and not in stock"),
        (("stock",), 1, "with the fixes 1 request differs, and not in stock"),
        (("stock-again",), 1, "with the fixes 1 request differs, and not in stock"),
        (("stock", "stock-again"), 0, "1 request differs from the server without replays; stock does not finish"),
    ],
)
def test_a_stock_server_that_has_ended_excuses_nothing_where_the_other_answers(
    dead: tuple[str, ...], status: int, said: str
) -> None:
    right, wrong = {"a": answer([5], [-0.1], [])}, {"a": answer([6], [-9.0], [])}
    ended: dict[str, Any] = {"answers": {}, "ending": "ended with exit status 1", "processes": 0, "replays": 0}
    found = {
        arm: ended if arm in dead else {**ended, "ending": command.FINISHED, "processes": 1, "answers": right}
        for arm in own_arms.ARMS
    }
    found["fixes"] = {**found["fixes"], "answers": wrong, "replays": 1}
    compared = {arm: compare.compare(found[arm]["answers"], right, compare.ROUNDING) for arm in own_arms.ARMS}
    got, verdict = command.verdict_of(found, compared)
    assert got == status and said in verdict


def test_a_strict_self_check_ends_no_server_that_refuses_replays(tmp_path: pathlib.Path) -> None:
    source = releases.in_folder(wheels.unpacked(RELEASE))
    launch = own_arms.Launch(("serve",), {flags.SELFCHECK: "strict"}, "localhost", 1, None, 2)
    checks = {arm: own_arms.environment_of(launch, arm, source, tmp_path)[flags.SELFCHECK] for arm in own_arms.ARMS}
    assert checks == {"stock": "strict", "fixes": "strict", "eager": "off", "stock-again": "strict"}


@pytest.mark.parametrize("state", ["lost", "failed"])
def test_what_one_rank_has_not_is_not_said_to_be_applied(state: str, tmp_path: pathlib.Path) -> None:
    for number, here in enumerate(("applied", state)):
        rows = [{"id": "a_fix", "state": "applied"}, {"id": "another", "state": here}]
        (tmp_path / f"{number}.json").write_text(json.dumps({"fixes": rows, "kernels": {}}))
    assert command.plugin_in(tmp_path)["applied"] == ["a_fix"]


def test_rounding_is_told_from_a_difference(verify: Verify, arms: Arms) -> None:
    assert verify(misbehaviour="fixes=rounds,stock=wrong logprobs")[0] == 0
    assert counts(arms, "explained") == [0, 48, 0, 0]
    assert counts(arms, "different") == [3, 0, 0, 3]
    reference = answer([6], [-0.7], [[[-0.7, 6], [-0.71, 5]]])
    tie = compare.one("a", answer([5], [-0.7], [[[-0.7, 5], [-0.71, 6]]]), reference, 0.05)
    assert tie.state == compare.EXPLAINED
    sure = compare.one("a", answer([5], [-0.7], [[[-0.7, 5], [-0.9, 6]]]), reference, 0.05)
    assert sure.state == compare.DIFFERENT and sure.difference == "token 0: 5 instead of 6"


def answer(tokens: list[int], logprobs: list[float], top: list[list[list[float]]]) -> dict[str, object]:
    return {"asked": "x", "tokens": tokens, "logprobs": logprobs, "top": top, "text": ""}


def test_a_bound_is_what_rounds_in_stock_and_without_replays_but_no_defect() -> None:
    one, other = ({"a": answer([5], [value], [])} for value in (-0.1, -7.0))
    assert compare.bound_of(one, other, one) == compare.LARGEST_BOUND
    assert compare.bound_of(one, {"a": answer([5], [-0.3], [])}, one) == pytest.approx(0.2)
    assert compare.bound_of(one, one, one) == compare.ROUNDING
    # the same prompt, asked in another way
    again = {**one, "b": answer([5], [-0.5], [])}
    assert compare.bound_of(one, one, again) == pytest.approx(0.4)
    assert compare.bound_of(one, one, {**one, "b": {**answer([5], [-0.5], []), "asked": "y"}}) == compare.ROUNDING
    tie = {**one, "b": answer([6], [-0.6], [[[-0.6, 6], [-0.9, 5]]])}
    assert compare.bound_of(one, one, tie) == pytest.approx(0.3)


def test_the_first_difference_and_the_end_of_a_log_are_printed(verify: Verify, tmp_path: pathlib.Path) -> None:
    _, said = verify(misbehaviour="fixes=wrong logprobs,stock=dies at start")
    assert re.search(r"^fixes, different: alone, 8 ids: token 0: logprob -1\S+ instead of -0\S+$", said, re.MULTILINE)
    assert re.search("^stock: its log says: AssertionError: out_cache_loc_swa", said, re.MULTILINE)
    assert re.search("^stock .*  ended with exit status 1$", said, re.MULTILINE)
    _, said = verify("--folder", str(tmp_path / "more"), misbehaviour="fixes=dies")
    assert "ended by signal 6; its log says: RuntimeError: an illegal memory access\n" in said


def test_a_server_that_never_answers_is_ended(
    verify: Verify, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = verify("--start-limit", "3", misbehaviour="stock=hangs at start")
    assert status == 0 and "no answer to /health within 3 s; its log is empty" in said
    monkeypatch.setattr(ask, "SECONDS_TO_ANSWER", 3)
    status, said = verify("--folder", str(tmp_path / "more"), misbehaviour="fixes=hangs")
    assert status == 1 and "no answer after 8 requests (timed out); it runs and does not answer" in said, said
    assert not running(SERVER) and not running(f"time.sleep({SLEEPS})")


def running(word: str) -> list[str]:
    listed = subprocess.run(["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in listed if word in line and line[0] != "Z"]


def test_arms_that_ended_well_are_kept(verify: Verify, arms: Arms, tmp_path: pathlib.Path) -> None:
    assert verify(misbehaviour="fixes=wrong tokens")[0] == 1
    kept = tmp_path / "runs" / "stock.json"
    before = kept.stat().st_mtime_ns
    found = json.loads((tmp_path / "runs" / "eager.json").read_text())
    (tmp_path / "runs" / "eager.json").write_text(json.dumps({**found, "ending": "ended by signal 9"}))
    (tmp_path / "runs" / "fixes.json").unlink()
    status, said = verify(misbehaviour="fixes=wrong tokens")
    assert status == 1 and "stock: kept from an earlier run" in said and "stock-again: kept" in said
    assert "eager: starting" in said and "fixes: starting" in said and "stock: starting" not in said
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["command", "setting", "prompts", "tokens"])
def test_another_command_is_refused_in_the_same_folder(
    verify: Verify, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    assert verify()[0] == 0
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"text": "Hello"}\n')
    if change == "setting":
        monkeypatch.setenv("SGLANG_BCG_FIXES", "off")
    words = {"prompts": ["--prompts", str(mine)], "tokens": ["--max-new-tokens", "3"]}.get(change, [])
    status, said = verify(*words, command="--dtype float16" if change == "command" else "")
    assert status == 2 and "holds another command, other prompts, or another version; name a new folder" in said, said


def test_a_prefix_cache_that_is_not_emptied_at_once_is_asked_again(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(ask, "SECONDS_TO_FLUSH", 0.3)
    status, said = verify(misbehaviour="stock=flushes late")
    assert status == 0 and "was not emptied" not in said
    status, said = verify("--folder", str(tmp_path / "more"), misbehaviour="stock=never flushes")
    assert status == 0 and "the prefix cache was not emptied: HTTP status 400\n" in said


@pytest.mark.parametrize("knows_processes", [True, False])
def test_memory_is_that_of_the_server_alone(
    verify: Verify, arms: Arms, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, knows_processes: bool
) -> None:
    programs, asked = tmp_path / "programs", tmp_path / "asked"
    programs.mkdir()
    smi = programs / "nvidia-smi"
    apps = f"pgrep -f {SERVER} | sed 's/$/, 4096/'; echo 1, 9216" if knows_processes else "echo 999999999, 4096"
    # others have 2 GiB on each of two GPUs, and while a server runs there are 3 GiB more on one
    smi.write_text(f"""#!/bin/sh
case $1 in *compute-apps*) {apps}; exit;; esac
echo x >> {asked}
echo 0, 2048
[ $(($(wc -l < {asked}) % 2)) = 1 ] && echo 1, 2048 || echo 1, 5120
""")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    status, said = verify()
    used = 4.0 if knows_processes else 3.0
    assert status == 0 and said.count(f"  {used} GiB  ") == 4, said
    assert [arm["memory"] for arm in arms().values()] == [{"weight": 1.5, "in use": used}] * 4


def test_a_folder_of_something_else_is_left_alone(verify: Verify, tmp_path: pathlib.Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("mine")
    status, said = verify()
    assert status == 2 and "is not empty, and not from an earlier run" in said
    assert [file.name for file in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_port_in_use_is_named(verify: Verify, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        status, said = verify()
    assert status == 2 and f"port {port} of 127.0.0.1 is in use, so another server would answer" in said


def test_prompts_of_every_kind_are_asked(verify: Verify, arms: Arms, tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine.jsonl"
    lines = ['{"text": "Hello"}', "", '{"input_ids": [1, 2]}', '{"messages": [{"role": "user", "content": "Hi"}]}']
    mine.write_text("\n".join(lines) + "\n")
    status, said = verify("--prompts", str(mine), misbehaviour="fixes=ties")
    assert (status, counts(arms, "equal")) == (0, [12] * 4), said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Hello", "is no JSON"),
        ('"Hello"', "holds 0 prompts"),
        ('{"prompt": "Hello"}', "holds 0 prompts"),
        ('{"text": "Hello", "input_ids": [1]}', "holds 2 prompts"),
        ('{"text": ""}', "text is not usable"),
        ('{"input_ids": [1, "2"]}', "input_ids is not usable"),
        ('{"messages": ["Hello"]}', "messages is not usable"),
    ],
)
def test_a_bad_line_is_named_by_its_number(verify: Verify, tmp_path: pathlib.Path, line: str, why: str) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(f'{{"text": "Hello"}}\n\n{line}\n')
    status, said = verify("--prompts", str(mine))
    assert status == 2 and re.search(rf"mine.jsonl, line 3:? {why}.*; write ", said), said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_prompts_that_are_not_there_are_refused(verify: Verify, tmp_path: pathlib.Path, content: str | None) -> None:
    mine = tmp_path / "mine.jsonl"
    if content is not None:
        mine.write_text(content)
    status, said = verify("--prompts", str(mine))
    assert status == 2 and re.search("holds no prompt; write" if content is not None else "cannot be read", said), said


def test_what_cannot_be_run_is_said(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["verify", "--", "no-such-program", "--port", "1"]) == 2
    assert "no-such-program cannot be run (No such file or directory)" in capsys.readouterr().err
    status, said = verify("--quick")
    assert status == 2 and "--quick is for tiny models; leave it out, or leave the command out" in said
    assert main.main(["verify", "--prompts", "x"]) == 2
    assert "--prompts is for a server of yours: put its command behind `--`" in capsys.readouterr().err
    monkeypatch.setenv("SGLANG_BCG", "off")
    status, said = verify()
    assert status == 2 and "SGLANG_BCG=off leaves nothing to compare; unset it" in said
    monkeypatch.setattr(releases, "installed", lambda: None)
    status, said = verify()
    assert status == 2 and "no SGLang is installed here" in said


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python -m sglang.launch_server --nnodes=2 --node-rank 0", "--nnodes 2 starts a part of the server on other"),
        ("docker run --gpus all image python -m sglang.launch_server --port 1", "docker starts the server where"),
        ("sudo /usr/bin/podman run image --model-path x", "/usr/bin/podman starts the server where"),
    ],
)
def test_a_server_that_is_not_all_here_is_refused_with_what_to_do(
    verify: Verify, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], command: str, why: str
) -> None:
    assert main.main(["verify", "--folder", str(tmp_path / "runs"), "--", *command.split()]) == 2
    said = capsys.readouterr().err
    assert why in said and re.search("; (run `bcg-fixes verify -- COMMAND` inside|give a command for one node)", said)
    assert not (tmp_path / "runs").exists()


def test_made_prompts_leave_room_and_stay_in_the_vocabulary() -> None:
    made = prompts.made(1000, 33)
    assert [len(prompt.content) for prompt in made] == [3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    assert all(0 <= token < 500 for prompt in made for token in prompt.content)
    assert made == prompts.made(1000, 33)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_from_outside_leaves_no_process(tmp_path: pathlib.Path, port: int, number: signal.Signals) -> None:
    folder, sleeper = tmp_path / "runs", f"time.sleep({SLEEPS})"
    words = ["verify", "--folder", str(folder), "--", "MISBEHAVIOUR=fixes=hangs at start"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_bcg_fixes", *words, sys.executable, SERVER, "--port", str(port)],
        env=processes.environment_of([wheels.unpacked(RELEASE)], {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell ignores it for what runs in its background, and this would be inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    try:
        while not running(sleeper):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        assert (folder / "stock.json").exists() and running(f"{SERVER} --port {port}")
    finally:
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 2, said
    assert f"interrupted; the server was ended. The same command with --folder {folder} goes on" in said.decode()
    assert not running(f"{SERVER} --port {port}") and not running(sleeper)
    assert not (folder / "fixes.json").exists()
