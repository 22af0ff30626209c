"""Schedulers of one server, and of two, as `bcg-fixes status` compares them."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import OTHERS_OFF, load
from tests.engine.test_read_back import BY_PLUGIN, REPLACED, STATUS

extra = test_plugin.extra
RANK = (
    STATUS
    + """
import setproctitle
setproctitle.setproctitle(sys.argv[1])
from sglang.srt import target
from sglang_bcg_fixes import plugin
process = plugin.load()
exec(sys.argv[2])
print("ready", flush=True)
input()
"""
)
# the main process of a server, which starts schedulers that each do something
SERVER = """
import os, subprocess, sys
def start(title, then, **environ):
    rank = subprocess.Popen([sys.executable, "-c", RANK, title, then], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            env={**os.environ, **environ})
    assert rank.stdout.readline() == b"ready\\n"
    return rank
def end(*ranks):
    for rank in ranks:
        rank.communicate(b"\\n")
        assert rank.returncode == 0
def status(*arguments):
    return subprocess.run([sys.executable, "-m", "sglang_bcg_fixes", "status", *arguments], capture_output=True,
                          text=True)
"""
READY = "build(); batch()"


def server(site: pathlib.Path, reports: pathlib.Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return load(site, reports, f"RANK = {RANK!r}\n{SERVER}\n{processes.code(code)}", **environ)


def test_ranks_that_have_the_same_are_no_news(extra, tmp_path: pathlib.Path) -> None:
    # the main process has imported less, and the detokenizer nothing
    code = f"""
        ranks = [start(f"sglang::scheduler_TP{{number}}", {READY!r}) for number in range(2)]
        ranks.append(start("sglang::detokenizer", ""))
        found = status()
        assert found.returncode == 0 and "DIFFER" not in found.stdout + found.stderr, found
        titles = [line.split(",")[0] for line in found.stdout.splitlines() if "  plan " in line]
        assert titles[1:] == ["detokenizer", "scheduler_TP0", "scheduler_TP1"], found.stdout
        end(*ranks)
    """
    done = server(extra(), tmp_path / "reports", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("then", "environ", "words"),
    [
        (
            READY,
            {"SGLANG_BCG_FIX_EXTRA_FIX": "off"},
            ["plans ", "scheduler_TP1 (pid RANK) has extra_fix off, and scheduler_TP0 (pid FIRST) has it applied"],
        ),
        (
            f"{REPLACED}\n{BY_PLUGIN}\n{READY}",
            {},
            ["scheduler_TP1 (pid RANK) has extra_fix lost, and scheduler_TP0 (pid FIRST) has it applied"],
        ),
    ],
    ids=["another plan", "lost in one"],
)
def test_a_rank_that_differs_is_said_aloud(
    extra, tmp_path: pathlib.Path, then: str, environ: dict[str, str], words: list[str]
) -> None:
    code = f"""
        first = start("sglang::scheduler_TP0", {READY!r})
        rank = start("sglang::scheduler_TP1", {then!r}, **{environ!r})
        import json
        found, machine = status(), status("--json")
        assert found.returncode == machine.returncode == 1, found
        rows = json.loads(machine.stdout)
        assert {{row["server"] for row in rows}} == {{os.getpid()}}, rows
        print(json.dumps([found.stdout, machine.stderr, str(rank.pid), str(first.pid)]))
        end(first, rank)
        assert status().returncode == 0
    """
    done = server(extra(), tmp_path / "reports", code)
    assert done.returncode == 0, done.stderr
    text, machine, rank, first = json.loads(done.stdout)
    told = [line.removeprefix("RANKS DIFFER: ") for line in text.splitlines() if line.startswith("RANKS DIFFER: ")]
    assert len(told) == len(words), text
    for line, expected in zip(told, words, strict=True):
        assert expected.replace("RANK", rank).replace("FIRST", first) in line, told
        assert f"bcg-fixes status: ranks differ: {line}\n" in machine, machine


def test_a_rank_that_still_loads_is_not_compared(extra, tmp_path: pathlib.Path) -> None:
    code = f"""
        first = start("sglang::scheduler_TP0", {READY!r})
        rank = start("sglang::scheduler_TP1", {REPLACED + BY_PLUGIN!r})
        assert status().returncode == 0
        end(first, rank)
    """
    done = server(extra(), tmp_path / "reports", code)
    assert done.returncode == 0, done.stderr


def test_two_servers_may_have_different_fixes(extra, tmp_path: pathlib.Path) -> None:
    main = f"RANK = {RANK!r}\n{SERVER}\n" + processes.code(f"""
        from sglang_bcg_fixes import plugin
        plugin.load()
        rank = start("sglang::scheduler", {READY!r})
        print("ready", flush=True)
        input()
        end(rank)
    """)
    # two servers are started by what has no plugin
    both = f"""
        import os, subprocess, sys
        MAIN = {main!r}
        servers = [subprocess.Popen([sys.executable, "-c", MAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    env={{**os.environ, "SGLANG_BCG_FIX_EXTRA_FIX": state}}) for state in ("off", "on")]
        for server in servers:
            assert server.stdout.readline() == b"ready\\n"
        command = [sys.executable, "-m", "sglang_bcg_fixes", "status", "--json"]
        found = subprocess.run(command, capture_output=True, text=True)
        import json
        rows = json.loads(found.stdout)
        assert found.returncode == 0 and len(rows) == 4, found
        assert sorted({{row["server"] for row in rows}}) == sorted(server.pid for server in servers), rows
        assert len({{row["plan"] for row in rows}}) == 2
        for server in servers:
            server.communicate(b"\\n")
            assert server.returncode == 0
    """
    done = processes.python(
        "-c",
        processes.code(both),
        paths=[processes.FAKE_SGLANG, extra()],
        environment={"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports"), **OTHERS_OFF},
    )
    assert done.returncode == 0, done.stderr
