# SPDX-License-Identifier: Apache-2.0
"""The page of a run: every request of the recorded runs is drawn, and what is not green is said."""

from __future__ import annotations

import collections
import json
import pathlib
import re
from typing import Any

import pytest

from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.lab.verify import compare, page
from sglang_bcg_fixes.lab.verify.arms import PATCHED, STOCK
from tests import processes

RESULTS = processes.REPOSITORY / "benchmarks" / "results"
RECORDED = sorted(RESULTS.glob("*verify-0*.json"))


def first_of(servers: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for server in servers:
        if server["arm"] in (STOCK, PATCHED):
            found.setdefault((server["case"], server["arm"]), server)
    return found


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_every_request_of_a_recorded_run_is_drawn(file: pathlib.Path) -> None:
    content = page.read(file)
    text = page.page(content)
    drawn = collections.Counter(re.findall(r'<rect x=[^>]*fill="(#\w+)"', text))
    wanted: collections.Counter[str] = collections.Counter()
    for server in first_of(content["servers"]).values():
        wanted[page.COLOURS[compare.EQUAL]] += server["equal"]
        wanted.update(page.COLOURS[request["outcome"]] for request in server["not_equal"])
    assert drawn == +wanted
    for (case, _), server in first_of(content["servers"]).items():
        assert f">{case}<small>" in text and f"{server['equal']} of {server['requests']}, " in text


def server(
    arm: str, verdict: str, equal: int, outcome: str = "", why: str = "", case: str = "a_case"
) -> dict[str, Any]:
    odd = [{"part": "alone", "length": 3, "outcome": outcome, "difference": "token 1 is <b>"}] if outcome else []
    return {
        "case": case,
        "arm": arm,
        "verdict": verdict,
        "why": why,
        "standard": "every token",
        "equal": equal,
        "requests": equal + len(odd),
        "not_equal": odd,
        "ending": "finished",
    }


def made(*servers: dict[str, Any]) -> str:
    about = {"sglang": "9.9", "gpu": "a GPU", "versions": {}, "bcg_fixes": "0", "commit": "", "date": "2026-11-25T00"}
    return page.page({**about, "servers": servers})


def test_a_green_run_says_what_to_start() -> None:
    text = made(server("stock", "red", 1, compare.DIFFERS, "wrong"), server("patched", "green", 2))
    assert "Every server with all fixes is green: <code>SGLANG_PLUGINS=bcg_fixes</code>" in text
    assert "<b>stock</b>: 1 of 2 requests are equal." in text and "<b>patched</b>: 2 of 2" in text
    # what a server said is text
    assert "<title>alone: token 1 is &lt;b&gt;</title>" in text


def test_the_second_server_of_an_arm_can_make_it_red() -> None:
    text = made(server("patched", "green", 2), server("patched", "red", 1, compare.BROKEN, "it broke"))
    assert "Not green with the plugin: a_case." in text and "it broke" in text and "is green:" not in text


def test_a_fix_alone_that_is_red_is_not_said_to_be_green() -> None:
    text = made(server("patched", "green", 2), server("alone", "red", 1, compare.DIFFERS, "wrong"))
    assert "Every server with all fixes is green" in text and "A fix alone is not green: a_case." in text


def test_an_arm_that_was_not_run_is_not_said_to_be_right() -> None:
    text = made(server("stock", "green", 2))
    assert "patched" not in text
    text = made(server("stock", "green", 2), server("patched", "green", 2, case="another"))
    assert text.count("<td>not run</td>") == 2


def test_the_page_of_an_earlier_run_needs_no_gpu(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert main.main(["verify", "--page-only", str(RECORDED[0]), "--page", str(file)]) == 0
    assert file.read_text() == page.page(json.loads(RECORDED[0].read_text()))
    assert main.main(["verify", "--page-only", str(RECORDED[0])]) == 2
    assert "--page FILE" in capsys.readouterr().err
    other = tmp_path / "other.json"
    for content in ("{}", "[]", "no JSON", '{"servers": []}'):
        other.write_text(content)
        assert main.main(["verify", "--page-only", str(other), "--page", str(file)]) == 2
        assert "bcg-fixes verify" in capsys.readouterr().err
