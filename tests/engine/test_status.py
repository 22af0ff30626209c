# SPDX-License-Identifier: Apache-2.0
"""The lines of `bcg-fixes status`: one for a server, what is not as it should be, and all where that is asked for."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from sglang_bcg_fixes.cli import status
from sglang_bcg_fixes.model import OURS
from sglang_bcg_fixes.planning import registry
from tests import processes

IDS = sorted(fix.id for fix in registry.discover().fixes)
MODEL = "Qwen3_5MoeForConditionalGeneration"


def fix(name: str, state: str, **further: Any) -> dict[str, Any]:
    told = {"state": state, "detail": f"why {name}", "switched_off": state == "off"}
    return {"id": name, **told, "owner": OURS, "calls": {"a": 3}, **further}


def process(pid: int, title: str, model: str | None = MODEL, **changed: str) -> dict[str, Any]:
    """A process with every second fix applied, the others not needed, `changed` in other states.

    The first four fixes concern its model, if it has one.
    """
    states = {name: changed.get(name, "not needed" if number % 2 else "applied") for number, name in enumerate(IDS)}
    fixes = [fix(name, states[name], concerns=name in IDS[:4] if model else None) for name in IDS]
    kernel = {"impl": "cuda", "state": "applied", "detail": "chosen", "calls": {}, "required": False, "rejected": {}}
    return {
        "pid": pid,
        "title": title,
        "process": f"Process-{pid} (pid {pid})",
        "server": 1,
        "model": model,
        "port": 30000 if model else None,
        "sglang": "0.5.23",
        "plan": "1f0c",
        "verified": {"line": "verified when it was built", "time": 1.0 * pid, "batches": 0},
        "batches": pid,
        "replays": 12304 if model else 0,
        "fallbacks": 0,
        "selfcheck": {"verdict": "right", "short": "right 7/7", "reason": "7 of 7 compared"} if model else None,
        "fixes": fixes,
        "kernels": {"gdn_extend": kernel},
    }


def ranks(count: int = 8, **changed: str) -> list[dict[str, Any]]:
    """A server: its first process, its schedulers, of which the last one has the changes, and its detokenizer."""
    schedulers = [process(10 + number, f"scheduler_TP{number}") for number in range(count - 1)]
    last = process(9 + count, f"scheduler_TP{count - 1}", **changed)
    return [process(1, "", None), *schedulers, last, process(40, "detokenizer", None)]


def shown(contents: list[dict[str, Any]], everything: bool = False) -> list[str]:
    return [line for server in status.servers(contents) for line in status.lines_of(server, everything)]


def test_a_server_in_which_all_is_well_has_one_line() -> None:
    words = "2 of 2 fixes live, self-check right 7/7, 12,304 replays, 0 fallbacks"
    assert shown(ranks()) == [f"OK     {MODEL} :30000 (8 ranks alike)  {words}"]
    assert shown(ranks(1)) == [f"OK     {MODEL} :30000  {words}"]


@pytest.mark.parametrize(
    ("state", "verdict"), [("lost", "WRONG"), ("failed", "WRONG"), ("unread", "CHECK"), ("blocked", "CHECK")]
)
def test_what_is_not_as_it_should_be_has_its_line_and_why(state: str, verdict: str) -> None:
    first, *others = shown(ranks(1, **{IDS[0]: state}))
    assert first.startswith(f"{verdict:5}  {MODEL} :30000  1 of 2 fixes live, ")
    assert others == [f"    {state:11} {IDS[0]}: why {IDS[0]}"]
    # another model's: nothing to look at, but for what was there and is gone
    first, *others = shown(ranks(1, **{IDS[6]: state}))
    assert bool(others) == (state == "lost") and first.startswith("WRONG" if others else "OK ")


def test_ranks_that_do_not_report_are_missed() -> None:
    server = [{**process(10 + number, f"scheduler_TP{number}"), "ranks": 4} for number in range(4)]
    assert len(shown(server)) == 1 and shown(server)[0].startswith("OK ")
    first, missing = shown(server[:3])
    assert first.startswith("CHECK ") and missing.startswith("    missing     3 of 4 ranks report: ")


def test_what_is_off_or_pending_is_nobodys_fault() -> None:
    assert shown(ranks(1, **{IDS[0]: "off"}))[0].startswith(
        f"OK     {MODEL} :30000  1 of 1 fixes live, 1 switched off, "
    )
    assert shown(ranks(1, **{IDS[0]: "pending"}))[0].startswith(f"OK     {MODEL} :30000  1 of 1 fixes live, self")


def test_ranks_that_differ_are_told() -> None:
    first, exception, difference = shown(ranks(2, **{IDS[0]: "unread"}))
    assert first.startswith(f"CHECK  {MODEL} :30000 (2 ranks differ)  ")
    assert exception == f"    unread      {IDS[0]}: why {IDS[0]}"
    assert difference == (
        f"RANKS DIFFER: scheduler_TP1 (pid 11) has {IDS[0]} unread, and scheduler_TP0 (pid 10) has it applied"
    )


def test_what_one_rank_has_found_wrong_is_said_of_the_server() -> None:
    server = ranks()
    server[3]["selfcheck"] = {"verdict": "wrong", "short": "wrong", "reason": "padded: off by 1"}
    first, exception = shown(server)
    assert first.startswith("WRONG  ") and exception == "    WRONG       self-check: padded: off by 1"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"state": "blocked", "detail": "no driver"}, []),
        ({"state": "blocked", "detail": "no driver", "required": True}, ["    blocked     gdn_extend: no driver"]),
        ({"required": True, "left": ["strided"]}, ["    not running gdn_extend: strided"]),
        ({"left": ["strided"]}, []),
        ({"state": "lost", "detail": "gone"}, ["    lost        gdn_extend: gone"]),
    ],
)
def test_a_kernel_is_told_of_where_it_was_asked_for_or_is_lost(changed: dict[str, Any], lines: list[str]) -> None:
    server = ranks(1)
    server[1]["kernels"]["gdn_extend"] |= changed
    first, *others = shown(server)
    # SGLang's own code is right
    assert others == lines and first.startswith("CHECK" if lines else "OK ")


def test_a_server_that_has_no_model_yet_is_not_called_well() -> None:
    server = [process(1, "", None, **{IDS[0]: "unread"})]
    assert shown(server) == ["CHECK  no model yet (pid 1)  0 of 0 fixes live, no self-check, 0 replays, 0 fallbacks"]


def test_what_is_not_verified_is_not_called_live() -> None:
    server = ranks(1)
    server[1]["verified"] = None
    first, exception = shown(server)
    assert first.startswith(f"CHECK  {MODEL} :30000  0 of 2 fixes live, ") and "could not be verified" in exception


def test_what_an_earlier_version_reports_is_shown() -> None:
    server = ranks(1)
    for content in server:
        for new in ("model", "port", "verified"):
            del content[new]
        content["fixes"] = [{**row, "state": "waiting"} for row in content["fixes"]]
        del content["selfcheck"]
    shown([status.with_calls(content) for content in server], everything=True)


def test_every_process_and_fix_can_be_asked_for() -> None:
    server = ranks(2)
    server[1]["fixes"][0]["owner"] = "theirs"
    server[1]["kernels"]["gdn_extend"]["rejected"] = {"triton": "cuda is chosen", "reference": "for tests"}
    lines = shown(server, everything=True)
    assert [line.split(",")[0] for line in lines if "  plan " in line][1:] == [
        *("scheduler_TP0", "scheduler_TP1", "detokenizer")
    ]
    for state, name in zip(["applied", "not needed"], IDS[:2], strict=True):
        calls = " (3 calls)" if state == "applied" else ""
        assert lines.count(f"    {state:11} {name}{calls}: why {name}") == 4
    assert f"    {'':11} package theirs" in lines and f"    {'':11} not reference: for tests" in lines


def test_a_reason_is_not_said_twice() -> None:
    server = ranks(1)
    why = {"cuda": "no driver", "triton": "no compiler"}
    server[1]["kernels"]["gdn_extend"] |= {
        "state": "off",
        "rejected": why,
        "detail": "cuda: no driver; triton: no compiler",
    }
    lines = shown(server, everything=True)
    assert sum("no driver" in line for line in lines) == 1


@pytest.mark.parametrize(("require", "code"), [([], 0), (["--require"], 1)])
def test_a_server_can_be_required(tmp_path: pathlib.Path, require: list[str], code: int) -> None:
    environment = {"SGLANG_BCG_REPORT_DIR": str(tmp_path)}
    done = processes.python("-m", "sglang_bcg_fixes", "status", "--json", *require, environment=environment)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout) == {"format": 2, "servers": [], "processes": []}
