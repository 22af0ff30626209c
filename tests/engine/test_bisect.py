# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes bisect`: the fix that changes an answer, in few runs, or why there is no result."""

from __future__ import annotations

import math
import os
import pathlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest

from sglang_bcg_fixes.cli import bisect
from sglang_bcg_fixes.process import procfs
from tests import processes

NAMES = [f"fix_{number:02}" for number in range(70)]
FLAGS = {name: f"SGLANG_BCG_FIX_{name.upper()}" for name in NAMES}
RELEASE = "0.5.12.post1"
A, B, C = (FLAGS[name] for name in ("fix_07", "fix_33", "fix_60"))
# what both ask costs, at most: on and off twice, and the answer once more
ALWAYS = 5
Root = Callable[[str], pathlib.Path]


def counted(culprits: set[str], order: Sequence[str] = NAMES) -> tuple[list[str], int]:
    """Search for what changes an answer only together; gives it, and the number of runs."""
    runs = 0

    def is_changed(off: Sequence[str]) -> bool:
        nonlocal runs
        runs += 1
        return culprits <= set(off)

    return bisect.needed(order, is_changed), runs


@pytest.mark.parametrize("culprit", [NAMES[0], NAMES[1], NAMES[33], NAMES[-1]])
def test_one_of_seventy_is_found_in_eight_runs(culprit: str) -> None:
    found, runs = counted({culprit})
    assert found == [culprit] and runs <= math.ceil(math.log2(len(NAMES))) + 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_few_that_change_it_together_are_found_in_any_order(count: int) -> None:
    dice = random.Random(count)
    for _ in range(50):
        order = dice.sample(NAMES, dice.randint(max(2, count), len(NAMES)))
        culprits = set(dice.sample(order, count))
        found, runs = counted(culprits, order)
        assert set(found) == culprits and len(found) == count
        assert runs <= count * (math.ceil(math.log2(len(order))) + 2)


def test_more_than_four_are_too_many() -> None:
    with pytest.raises(
        bisect.BisectError, match=r"more than 4 change it together, .* among them, or it varies; name few: --among"
    ):
        counted(set(NAMES[10:15]))


def test_the_page_says_how_many_runs_it_takes() -> None:
    page = (processes.REPOSITORY / "docs" / "troubleshooting.md").read_text()
    runs = ALWAYS + max(counted({name})[1] for name in NAMES)
    assert runs == 13 and "One of seventy takes thirteen runs" in page


def search(script: str, folder: pathlib.Path, limit: float = 60) -> tuple[list[str], list[str], bisect.Search]:
    """Search with a shell's script as the command; gives what was found, and what was said."""
    said: list[str] = []
    made = bisect.Search(bisect.Command(["sh", "-c", script], folder, limit).run, FLAGS, said.append)
    return made.result(), said, made


def when(condition: str, then: str, otherwise: str = "echo right") -> str:
    return f"if {condition}; then {then}; else {otherwise}; fi"


def off(*flags: str) -> str:
    return " && ".join(f'[ "${flag}" = off ]' for flag in flags)


@pytest.mark.parametrize(
    "script",
    [
        when(off(B), "echo wrong"),
        when(off(B), "exit 1", "exit 0"),
        when(off(B), "echo right; exit 1"),
        when(off(B), "kill -9 $$"),
        when(off(B), "echo right", "exit 3"),
    ],
    ids=["output", "status", "status alone", "killed", "worse with it"],
)
def test_output_and_exit_status_are_the_answer(tmp_path: pathlib.Path, script: str) -> None:
    found, said, made = search(script, tmp_path)
    assert found == ["fix_33"] and made.count == len(said) <= ALWAYS + math.ceil(math.log2(len(NAMES))) + 1
    assert said[0].startswith("run  1  all on: exit status ") and said[1] == "run  2  all on, again: as with all on"
    assert said[-1].endswith("off, again: fix_33: as with all off")


def test_either_of_two_is_enough(tmp_path: pathlib.Path) -> None:
    found, *_ = search(when(off(A, C), "echo wrong"), tmp_path)
    assert set(found) == {"fix_07", "fix_60"}


@pytest.mark.parametrize(("first", "second"), [(A, C), (C, A)], ids=["needs a later one", "needs an earlier one"])
def test_one_that_needs_another_is_not_taken_for_the_culprit(tmp_path: pathlib.Path, first: str, second: str) -> None:
    # the first one may be off only where the second one is
    broken = f'[ "${first}" = off ] && [ "${second}" != off ]'
    found, said, _ = search(f"{when(broken, 'echo broken; exit 9', ':')}; {when(off(B), 'echo wrong')}", tmp_path)
    assert found == ["fix_33"]
    # of beginnings of the list, only those with an earlier one and without a later one
    assert any("exit status 9" in line for line in said) is (first == A)


def test_the_same_answer_with_all_off_is_no_result_to_search_for(tmp_path: pathlib.Path) -> None:
    found, said, _ = search("echo right", tmp_path)
    assert found == [] and len(said) == 3


def test_an_answer_that_varies_with_all_on_proves_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(bisect.BisectError, match="gives another answer, so a change proves nothing; ask one prompt"):
        search("echo $$", tmp_path)
    assert len(list(tmp_path.glob("*.stdout"))) == 2


def test_garbage_without_a_fix_is_another_answer_each_time(tmp_path: pathlib.Path) -> None:
    found, _, made = search(when(off(B), "echo $$"), tmp_path)
    assert found == ["fix_33"] and made.off_varies


def test_an_answer_that_varies_later_is_told(tmp_path: pathlib.Path) -> None:
    # wrong until the search is over
    count = f'echo >> "{tmp_path}/count"; '
    script = when(f'{off(B)} && [ $(wc -l < "{tmp_path}/count") -lt 13 ]', "echo wrong")
    with pytest.raises(bisect.BisectError, match="without fix_33 the answer is not the same each time"):
        search(count + script, tmp_path)


def test_a_hang_is_an_answer_and_is_ended(tmp_path: pathlib.Path) -> None:
    started = time.monotonic()
    said: list[str] = []
    command = bisect.Command(["sh", "-c", when(off(B), "sleep 60")], tmp_path, 1)
    assert bisect.Search(command.run, {"fix_33": B}, said.append).result() == ["fix_33"]
    assert "no end in time" in said[2] and time.monotonic() - started < 30


def test_what_a_command_leaves_running_is_ended(tmp_path: pathlib.Path) -> None:
    bisect.Command(["sh", "-c", "sleep 60 & echo $!"], tmp_path, 60).run(1, [])
    number = int((tmp_path / "01.stdout").read_text())
    deadline = time.monotonic() + 10
    while is_running(number):
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def is_running(number: int) -> bool:
    status = pathlib.Path(f"/proc/{number}/stat")
    return procfs.start_ticks(number) is not None and status.exists() and ") Z " not in status.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere/ask"], "/nowhere/ask cannot be run (No such file or directory); name a program or a script"),
        (["sh", "-c", "no_such_program"], "exit status 127 is a shell's for a command that it cannot run; see "),
        (["sh", "-c", "/"], "exit status 126 is a shell's"),
    ],
)
def test_a_command_that_cannot_be_run_is_no_answer(tmp_path: pathlib.Path, words: list[str], said: str) -> None:
    with pytest.raises(bisect.BisectError) as caught:
        bisect.Command(words, tmp_path, 60).run(1, [])
    assert said in str(caught.value)


@pytest.mark.parametrize(("given", "used"), [(None, "off"), ("", "off"), ("strict", "strict")])
def test_the_self_check_does_not_hide_a_wrong_replay(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.delenv("SGLANG_BCG_SELFCHECK", raising=False)
    if given is not None:
        monkeypatch.setenv("SGLANG_BCG_SELFCHECK", given)
    monkeypatch.setenv(A, "on")
    script = f'echo "$SGLANG_BCG_SELFCHECK ${A} ${B}"'
    assert bisect.Command(["sh", "-c", script], tmp_path, 60).run(1, [B]).output == f"{used} on off\n".encode()


def command(root: pathlib.Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "sglang_bcg_fixes", "bisect", *arguments, paths=[root], environment=environ)


def test_of_a_release_it_names_the_fix_and_how_to_go_on(release_root: Root, tmp_path: pathlib.Path) -> None:
    name, flag = "linear_attention_captured", "SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED"
    done = command(release_root(RELEASE), "--folder", str(tmp_path), "--", "sh", "-c", when(off(flag), "echo wrong"))
    first, *runs, last, how = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    total = re.fullmatch(rf"(\d+) fixes and kernels are on; the output of each run is kept in {tmp_path}", first)
    assert total and int(total[1]) > 20 and len(runs) <= ALWAYS + math.ceil(math.log2(int(total[1]))) + 1
    assert last == f"{name} changes the answer: with {flag}=off alone it is as with all of them off"
    assert how == f"`bcg-fixes explain {name}` says what it is for"
    assert (tmp_path / f"{len(runs):02}.stdout").read_text() == "wrong\n"


def test_kernels_are_searched_too_and_only_those_that_are_named(release_root: Root, tmp_path: pathlib.Path) -> None:
    names = "vlm_embeds_dropped,linear_attention_captured"
    script = when(off("SGLANG_BCG_FIX_VLM_EMBEDS_DROPPED"), "echo $$")
    done = command(release_root(RELEASE), "--among", names, "--folder", str(tmp_path), "--", "sh", "-c", script)
    assert done.returncode == 0 and done.stdout.startswith("2 fixes and kernels are on; "), done.stderr
    assert "with SGLANG_BCG_FIX_VLM_EMBEDS_DROPPED=off alone it varies, as with all of them off" in done.stdout
    kernel = {"SGLANG_BCG_KERNEL_FA_METADATA": "reference"}
    script = when(off("SGLANG_BCG_KERNEL_FA_METADATA"), "echo slow")
    asked = ("--among", "fa_metadata", "--folder", str(tmp_path / "kernel"), "--", "sh", "-c", script)
    done = command(release_root(RELEASE), *asked, **kernel)
    assert done.returncode == 0 and "fa_metadata changes the answer" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "said"),
    [
        (["--", "echo", "right"], {}, 1, "no fix changes the answer: it is the same with all of them off"),
        (
            ["--", "true"],
            {},
            2,
            "bisect: nothing was answered, with all of them on and off alike: exit status 0, no output",
        ),
        (
            ["--limit", "0.2", "--", "sleep", "100"],
            {},
            2,
            "nothing was answered, with all of them on and off alike: no end",
        ),
        (["--limit", "2", "--", "sh", "-c", "echo right; sleep 9"], {}, 2, "nothing was answered"),
        (["--", "/nowhere/ask"], {}, 2, "bcg-fixes bisect: /nowhere/ask cannot be run"),
        (
            ["--among", "vlm_embeds_droped", "--", "true"],
            {},
            2,
            "'vlm_embeds_droped' is not on here; did you mean vlm_",
        ),
        (["--among", "", "--", "true"], {}, 2, "--among: '' is not on here"),
        (
            ["--", "true"],
            {"SGLANG_BCG_FIXES": "off"},
            2,
            "no fix and no kernel is on for this SGLang, with these flags",
        ),
        (["--", "echo", "right"], {"SGLANG_PLUGINS": "other"}, 1, "warning: SGLang will NOT load the plugin"),
    ],
)
def test_what_gives_no_result_says_why(
    release_root: Root, tmp_path: pathlib.Path, arguments: list[str], environ: dict[str, str], code: int, said: str
) -> None:
    done = command(release_root(RELEASE), *arguments, **environ, TMPDIR=str(tmp_path))
    assert done.returncode == code and said in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert code == 1 or "no fix changes the answer" not in done.stdout


def test_the_runs_of_an_earlier_search_are_left_alone(release_root: Root, tmp_path: pathlib.Path) -> None:
    folder, file = tmp_path / "runs", tmp_path / "file"
    file.touch()
    asked = ("--folder", str(folder), "--", "echo", "right")
    assert command(release_root(RELEASE), *asked).returncode == 1
    before = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    again = command(release_root(RELEASE), *asked)
    assert again.returncode == 2 and f"--folder: {folder} holds the runs of an earlier search" in again.stderr
    assert {each.name: each.stat().st_mtime_ns for each in folder.iterdir()} == before and len(before) == 6
    wrong = command(release_root(RELEASE), "--folder", str(file), "--", "echo", "right")
    assert wrong.returncode == 2 and f"--folder: {file} cannot take the runs (File exists)" in wrong.stderr


def test_without_sglang_it_says_where_to_run_it() -> None:
    code = "import sys; sys.modules['sglang'] = None; from sglang_bcg_fixes.cli import main; sys.exit(main.main())"
    environment = {**os.environ, "PYTHONPATH": str(processes.REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code, "bisect", "--", "true"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and "no SGLang is installed here" in done.stderr, done.stderr
