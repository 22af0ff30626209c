# SPDX-License-Identifier: Apache-2.0
"""`bcg-fixes verify` with servers that do just what it must notice."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.fixes import linear_attention_captured as watched
from sglang_bcg_fixes.lab.verify import cases, command, environment, servers
from sglang_bcg_fixes.lab.verify.cases import Standard
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import releases
from tests import processes, wheels

RELEASE = "0.5.12.post1"
Verify = Callable[..., int]
Rows = Callable[[], dict[str, dict[str, Any]]]
# to parse a release takes longer than all that the servers here do
in_folder_once = functools.cache(releases.in_folder)


def four_calls(buckets: Sequence[int]) -> list[cases.Call]:
    script = cases.Script()
    first = script.ask("alone", [5])
    script.ask("alone", [9])
    script.ask("together", [3, 4])
    script.ask_again("again", first)
    return script.calls


CASE = cases.Case("a_case", "A test.", "llama", script=four_calls, watches=(registry.declared_in(watched).id,))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The interpreter's properties; tests change them."""
    found: dict[str, object] = {
        "root": str(wheels.unpacked(RELEASE)),
        "sglang": RELEASE,
        "has_entry_point": True,
        "gpu": "a GPU",
        "free_gib": 80.0,
        "gpu_count": 1,
        "versions": {"torch": "2"},
        "bcg_fixes": "0.1.0",
        "commit": "abc",
    }
    monkeypatch.setattr(environment, "look", lambda python: found)
    monkeypatch.setattr(releases, "in_folder", in_folder_once)
    monkeypatch.setattr(cases, "CASES", (CASE,))
    monkeypatch.setattr(command, "make_models", lambda *_: None)
    monkeypatch.setattr(command, "ENGINE", "tests.verify.fake_engine")
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))
    return found


@pytest.fixture
def verify(here: dict[str, object], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    def verify(*words: str, misbehaviour: str = "") -> int:
        monkeypatch.setenv("MISBEHAVIOUR", misbehaviour)
        words = words if "--case" in words else ("--case", "a_case", *words)
        return main.main(["verify", "--json", str(tmp_path / "found.json"), "--jobs", "5", *words])

    return verify


@pytest.fixture
def rows(tmp_path: pathlib.Path) -> Rows:
    return lambda: {
        f"{row['arm']} {row['number']}": row for row in json.loads((tmp_path / "found.json").read_text())["servers"]
    }


def test_once_starts_each_arm_once(verify: Verify, rows: Rows, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "pages" / "found.html"
    assert verify("--once", "--page", str(page)) == 0
    assert list(rows()) == ["patched 1", "reference 1", "stock 1"]
    assert "<b>patched</b>: 5 of 5 requests are equal." in page.read_text()
    assert json.loads((tmp_path / "found.json").read_text())["once"] is True


def started(tmp_path: pathlib.Path) -> list[tuple[str, str]]:
    found = json.loads((tmp_path / "found.json").read_text())["servers"]
    return [(row["case"], row["arm"]) for row in found]


@pytest.fixture
def two_cases(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", (CASE, dataclasses.replace(CASE, name="another")))


def test_a_run_that_resumes_keeps_the_cases_that_are_whole(
    two_cases: None, verify: Verify, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--once", "--resume", misbehaviour="patched=wrong tokens") == 1
    capsys.readouterr()
    # the first case is red in the file, and stays so, whatever its servers would do now
    assert verify("--once", "--resume", "--case", "a_case", "--case", "another") == 1
    assert [case for case, _ in started(tmp_path)] == ["a_case"] * 3 + ["another"] * 3
    assert "a_case" not in capsys.readouterr().out
    assert verify("--once", "--case", "a_case", "--case", "another") == 0
    assert verify("--once", "--resume", "--case", "a_case", "--case", "another") == 0
    assert len(started(tmp_path)) == 6


def test_what_has_ended_stands_in_the_file_before_the_last_server_ends(
    two_cases: None, verify: Verify, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    def write_and_look(*words: Any) -> None:
        write(*words)
        written.append(started(tmp_path))

    write = command.write
    monkeypatch.setattr(command, "write", write_and_look)
    assert verify("--once", "--jobs", "1", "--case", "a_case", "--case", "another") == 0
    # a case is there with all of its servers or not at all
    assert [[case for case, _ in rows] for rows in written[:2]] == [["a_case"] * 3] * 2
    assert len(written[-1]) == 6 and [file.name for file in tmp_path.iterdir()] == ["found.json"]


def test_a_case_whose_difference_is_asked_about_waits_for_the_answer(
    here: dict[str, object], verify: Verify, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.update(root=str(wheels.unpacked("0.5.15.post1")), sglang="0.5.15.post1")
    written: list[Any] = []
    monkeypatch.setattr(command, "write", lambda _, content: written.append(len(content["servers"])))
    assert verify("--once", misbehaviour="patched=wrong tokens") == 1
    assert written == [4]


def test_a_case_that_was_run_with_other_flags_is_run_again(
    two_cases: None, verify: Verify, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--once", "--case", "a_case", "--case", "another")
    assert verify(*words) == 0
    file = tmp_path / "found.json"
    found = json.loads(file.read_text())
    # of a working tree that was changed and not committed
    found["servers"][0]["environment"]["SGLANG_BCG_FIXES"] = "off"
    found["servers"][3]["flags"]["--dtype"] = "float16"
    file.write_text(json.dumps(found))
    capsys.readouterr()
    assert verify("--resume", *words) == 0
    printed = capsys.readouterr().out
    assert "a_case" in printed and "another" in printed
    assert verify("--resume", *words) == 0
    assert "a_case" not in capsys.readouterr().out


def test_a_case_that_was_cut_off_is_run_again(two_cases: None, verify: Verify, tmp_path: pathlib.Path) -> None:
    assert verify("--once", "--case", "a_case", "--case", "another") == 0
    file = tmp_path / "found.json"
    found = json.loads(file.read_text())
    found["servers"][1]["ending"] = servers.NEVER_STARTED.ending
    del found["servers"][-1]
    file.write_text(json.dumps(found))
    assert verify("--once", "--resume", "--case", "a_case", "--case", "another") == 0
    assert [case for case, _ in started(tmp_path)] == ["a_case"] * 3 + ["another"] * 3


def test_nothing_of_another_sglang_is_kept(
    verify: Verify, here: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--once") == 0
    assert verify("--quick", "--resume") == 2
    assert "recorded with another quick" in capsys.readouterr().err
    here["versions"] = {"torch": "3"}
    assert verify("--once", "--resume") == 2
    assert "recorded with another versions" in capsys.readouterr().err
    assert verify("--once") == 0


def test_a_file_that_cannot_be_read_is_named(
    verify: Verify, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found.json").write_text('{"servers": [')
    assert verify("--once", "--resume") == 2
    assert "found.json cannot be read" in capsys.readouterr().err


def test_equal_answers_and_replays_are_green(verify: Verify, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify() == 0
    found = rows()
    assert list(found) == ["patched 1", "reference 1", "reference 2", "patched 2", "stock 1"]
    assert {name: row["verdict"] for name, row in found.items()} == {
        **dict.fromkeys(["patched 1", "patched 2", "stock 1"], "green"),
        **dict.fromkeys(["reference 1", "reference 2"], "for information"),
    }
    assert all(row["equal"] == row["requests"] == 5 for row in found.values())
    assert found["patched 1"]["counts"]["prefill"]["replayed"] == 4
    assert found["reference 1"]["counts"]["prefill"] == {
        "captured": 1,
        "replayed": 0,
        "admitted, not replayed": 0,
        "refused": 4,
        "reasons": {"for the reference": 4},
    }
    printed = capsys.readouterr()
    assert "a_case" in printed.out and "5/5" in printed.out and "red" not in printed.out
    assert "5 servers, 5 at a time" in printed.err and "[5/5]" in printed.err


@pytest.mark.parametrize(
    ("misbehaviour", "said"),
    [
        ("crashes", "ended by signal 9 while it served"),
        ("dies at start", "ended with exit status 1 before it served"),
        ("wrong tokens", "alone, 9 tokens: token 1 is"),
        ("wrong logprobs", "alone, 9 tokens: logprobs of token 1 differ (logprob off by"),
        ("differs when asked again", "again, 5 tokens: token 0 is"),
        ("not a number", "alone, 5 tokens: a logprob is not a number"),
        ("too short", "alone, 5 tokens: 11 tokens instead of 12"),
        ("never replays", "proves nothing: no prefill pass was replayed"),
        ("captures nothing", "proves nothing: no prefill pass was replayed, and nothing was captured"),
        ("only admits", "proves nothing: no prefill pass was replayed"),
    ],
)
def test_what_goes_wrong_is_red(
    verify: Verify,
    rows: Rows,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    misbehaviour: str,
    said: str,
) -> None:
    monkeypatch.setattr(watched, "FIX", dataclasses.replace(watched.FIX, patches=()))
    assert verify("--quick", misbehaviour=f"patched={misbehaviour}") == 1
    found = rows()["patched 1"]
    assert found["verdict"] == "red" and said in found["why"], found["why"]
    printed = capsys.readouterr().out
    assert said in printed and f"known: {registry.declared_in(watched).id} has no fix in this version" in printed
    if misbehaviour == "dies at start":
        assert any("out_cache_loc_swa has different dtype" in line for line in found["log_tail"])
    if misbehaviour == "only admits":
        assert "fallbacks: admitted, not replayed 4" in printed


def test_a_log_does_not_tell_where_this_machine_keeps_things(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/", str(tmp_path), f"{tmp_path}/unpacked/"])
    folder = tmp_path / "made"
    text = (
        f"{folder}/a_case/patched-1/log; {tmp_path}/unpacked/sglang/a.py:3 {pathlib.Path.home()}/x\n"
        'File "/srv/venv/lib/python3.12/site-packages/torch/b.py", line 2\n/usr/lib/python3/dist-packages/c.py'
    )
    assert servers.without_places(text, folder / "a_case" / "patched-1") == (
        'a_case/patched-1/log; sglang/a.py:3 ~/x\nFile "torch/b.py", line 2\nc.py'
    )


def test_a_bucket_that_is_asked_for_and_never_replayed_is_red(
    verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def each_bucket(buckets: Sequence[int]) -> list[cases.Call]:
        script = cases.Script()
        for size in buckets:
            script.ask("edges", [size])
        return script.calls

    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, script=each_bucket),))
    assert verify("--quick") == 0
    assert verify("--quick", misbehaviour="patched=replays small ones") == 1
    assert rows()["patched 1"]["why"] == "proves nothing: no prefill pass was replayed in bucket 512"


@pytest.mark.parametrize("release", ["0.5.11", "0.5.15.post1", wheels.NEWEST])
def test_a_quick_run_takes_three_cases_that_show_most(release: str) -> None:
    source = releases.in_folder(wheels.unpacked(release))
    known = registry.discover()
    needed = command.needed_fixes(plan.make(known, flags.read(known.fixes, known.kernels, {}), source))
    chosen = command.run_by_default(known, source)
    few = command.few_that_show_most(needed, chosen)
    assert len(few) == command.QUICK_CASES and len({case.name for case in few}) == len(few)

    def shown(some: Sequence[cases.Case]) -> int:
        return sum(any(case.name in fix.verify for case in some) for fix in needed)

    # one case instead of another shows no more, and what can be shown at all is twice as much at most
    assert all(shown([*few[:-1], other]) <= shown(few) for other in chosen)
    assert 0 < shown(few[:1]) < shown(few[:2]) < shown(few) <= shown(chosen) <= 2 * shown(few)


def test_few_cases_are_enough_for_few_fixes() -> None:
    known = registry.discover()
    shown = next(fix for fix in known.fixes if fix.verify)
    assert [case.name in shown.verify for case in command.few_that_show_most([shown], cases.CASES)] == [True]
    assert command.few_that_show_most([dataclasses.replace(shown, verify=())], cases.CASES) == []


def test_logprobs_that_no_server_gives_are_not_equal(verify: Verify, rows: Rows) -> None:
    both = "patched=no logprobs,reference=no logprobs"
    assert verify("--quick", misbehaviour=both) == 1
    assert rows()["patched 1"]["why"] == "alone, 5 tokens: 0 logprobs of 12 tokens"


@pytest.mark.parametrize("misbehaviour", ["hangs", "hangs at start"])
def test_a_server_that_hangs_is_red_and_is_killed(
    verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch, misbehaviour: str
) -> None:
    monkeypatch.setattr(servers.Runner.__init__, "__defaults__", ((8, 3),))
    began = time.monotonic()
    assert verify("--quick", misbehaviour=f"patched={misbehaviour}") == 1
    found = rows()["patched 1"]
    assert found["verdict"] == "red" and found["ending"].startswith("hung: no "), found["ending"]
    assert [request["outcome"] for request in found["not_equal"]].count("missing") == (
        5 if misbehaviour == "hangs at start" else 3
    )
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("misbehaviour", "said"),
    [
        ("reference=wrong logprobs", ""),
        ("reference=crashes", "the reference: ended by signal 9"),
        ("reference=replays", "the reference replayed 4 times"),
    ],
)
def test_a_reference_that_cannot_be_relied_on_makes_it_inconclusive(
    verify: Verify, rows: Rows, misbehaviour: str, said: str
) -> None:
    assert verify("--quick", misbehaviour=misbehaviour) == 1
    found = rows()["patched 1"]
    # alone, a wrong reference cannot be told from a wrong server
    assert found["verdict"] == ("inconclusive" if said else "red") and said in found["why"], found["why"]


def test_two_references_that_differ_make_it_inconclusive(
    verify: Verify, rows: Rows, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = servers.environment_of

    def only_the_second(server: servers.Server) -> dict[str, str]:
        wrong = "reference=wrong logprobs" if server.name.endswith("reference-2") else ""
        return {**started(server), "MISBEHAVIOUR": wrong}

    monkeypatch.setattr(servers, "environment_of", only_the_second)
    assert verify() == 1
    found = rows()
    assert {found[name]["verdict"] for name in ("patched 1", "patched 2", "stock 1")} == {"inconclusive"}
    assert "two references differ in 1 requests, first: alone, 9 tokens: logprobs of token 1" in found["stock 1"]["why"]


def test_a_fix_that_is_needed_and_not_there_is_red(verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    # a case that a needed fix names, and servers that apply nothing
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, name="qwen3_next_prefill_graph"),))
    assert verify("--quick", "--case", "qwen3_next_prefill_graph", "--arms", "stock,patched") == 1
    found = rows()
    why = found["patched 1"]["why"]
    assert why.startswith("needed and not reported as applied: ") and "linear_attention_captured" in why
    assert found["stock 1"]["verdict"] == "green"


def test_a_fix_of_code_that_the_server_never_imports_is_not_missing(
    verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, name="qwen3_next_prefill_graph"),))
    monkeypatch.setenv("ALL_WAIT", "linear_attention_captured,stack_call_signature")
    assert verify("--once", "--case", "qwen3_next_prefill_graph") == 0
    assert rows()["patched 1"]["waiting"] == ["linear_attention_captured", "stack_call_signature"]
    monkeypatch.setenv("ALL_WAIT", "linear_attention_captured")
    assert verify("--once", "--case", "qwen3_next_prefill_graph") == 1
    assert rows()["patched 1"]["why"] == "needed and not reported as applied: stack_call_signature"


@pytest.mark.parametrize(
    ("says", "verdict", "why"),
    [
        ("applied", "green", ""),
        ("pending", "inconclusive", "alone, and not reported as applied: linear_attention_captured"),
        ("", "red", "alone, and not reported as applied: linear_attention_captured"),
    ],
)
def test_a_fix_alone_that_was_not_applied_shows_nothing(
    verify: Verify, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, says: str, verdict: str, why: str
) -> None:
    name = "qwen3_next_prefill_graph"
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, name=name),))
    monkeypatch.setenv("ALL_ARE", says)
    monkeypatch.setenv("ALL_WAIT", "linear_attention_captured" if says else "")
    assert verify("--once", "--case", name, "--fix", "linear_attention_captured", "--arms", "alone") == bool(why)
    found = json.loads((tmp_path / "found.json").read_text())["servers"]
    assert [(row["verdict"], row["why"]) for row in found if row["arm"] == "alone"] == [(verdict, why)]


def test_a_fix_that_sglang_does_not_need_is_not_tried_alone(
    here: dict[str, object], verify: Verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, name="llama_several_requests"),))
    # later releases do not have the defect
    here.update(root=str(wheels.unpacked("0.5.23")), sglang="0.5.23")
    words = ("--once", "--case", "llama_several_requests", "--fix", "single_request_capture", "--arms", "alone")
    assert verify(*words) == 2
    assert "so none can be alone" in capsys.readouterr().err


def test_servers_that_are_not_under_test_make_nothing_green(verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--once", "--arms", "eager") == 2
    assert "no server is under test" in capsys.readouterr().err


def test_a_fix_that_one_process_has_lost_is_not_applied(tmp_path: pathlib.Path) -> None:
    server = servers.Server("a_case/patched-1", tmp_path / "a_case" / "patched-1", {}, {})
    server.reports.mkdir(parents=True)
    server.log.write_text("")
    for pid, states in enumerate((("applied", "applied", "pending"), ("pending", "lost", "failed"))):
        fixes = [{"id": name, "state": state} for name, state in zip("abc", states, strict=True)]
        kernels = {"d": {"state": states[1], "impl": "triton"}, "e": {"state": states[0], "impl": "cuda"}}
        (server.reports / f"{pid}.json").write_text(json.dumps({"fixes": fixes, "kernels": kernels}))
    found = servers.outcome(server, servers.FINISHED, 1.0)
    assert found.applied == ["a"] and not found.waiting and found.kernels == {"e": "cuda"}


def test_red_that_stock_shows_bit_for_bit_is_said_to_be_so(verify: Verify, rows: Rows) -> None:
    assert verify("--quick", "--arms", "stock,patched", misbehaviour="stock=wrong tokens,patched=wrong tokens") == 1
    assert rows()["patched 1"]["why"].endswith("; stock gives the same answers")
    assert verify("--quick", "--arms", "stock,patched", misbehaviour="stock=wrong logprobs,patched=wrong tokens") == 1
    assert "stock gives" not in rows()["patched 1"]["why"]


def test_kernels_that_round_otherwise_are_left_out(verify: Verify, rows: Rows) -> None:
    assert verify("--quick", "--arms", "stock,patched") == 0
    for found in rows().values():
        assert found["environment"]["SGLANG_BCG_KERNEL_GDN_EXTEND"] == "off"
        # all its answers are integers
        assert "SGLANG_BCG_KERNEL_FA_METADATA" not in found["environment"]


def test_a_flag_is_of_the_patched_server_alone(verify: Verify, rows: Rows) -> None:
    flag = "SGLANG_BCG_KERNEL_ATTENTION_EXTEND"
    assert verify("--once", "--arms", "stock,patched", "--flag", f"{flag}=fa3") == 0
    assert {name: row["environment"].get(flag) for name, row in rows().items()} == {
        "patched 1": "fa3",
        "reference 1": None,
        "stock 1": None,
    }


def test_graphs_without_breaks_are_counted_and_padding_explains_nothing_of_them(
    here: dict[str, object], verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, unbroken=True),))
    here.update(root=str(wheels.unpacked("0.5.17")), sglang="0.5.17")
    assert verify("--once", misbehaviour="patched=wrong tokens,padded=wrong tokens") == 1
    found = rows()
    assert set(found) == {"patched 1", "reference 1", "stock 1"} and found["patched 1"]["verdict"] == "red"
    for row in found.values():
        assert "count_unbroken_graphs" in row["environment"]["SGLANG_BCG_INSTRUMENTS"].split(",")
        assert row["flags"]["--cuda-graph-backend-prefill"] == "full"


def test_graphs_without_breaks_are_run_by_name_alone(
    here: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "CASES", (CASE, dataclasses.replace(CASE, name="another", unbroken=True)))
    here.update(root=str(wheels.unpacked("0.5.17")), sglang="0.5.17")
    assert main.main(["verify", "--plan"]) == 0
    assert "a_case/" in (printed := capsys.readouterr().out) and "another/" not in printed


def test_what_resumes_must_come_from_a_cache(verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    resumes = dataclasses.replace(CASE, resumes=True, phase=None, standard=Standard.REPEATED)
    monkeypatch.setattr(cases, "CASES", (resumes,))
    assert verify("--once") == 1
    assert rows()["patched 1"]["why"].startswith("again, 5 tokens: nothing of it was in the cache")
    assert verify("--once", misbehaviour="patched=finds it") == 0


@pytest.mark.parametrize("standard", [Standard.BITS, Standard.BREAKS])
def test_attention_inside_is_compared_with_eager_prefill_or_with_breaks(
    verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch, standard: Standard
) -> None:
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, inside=True, standard=standard),))
    flag = "SGLANG_BCG_KERNEL_ATTENTION_EXTEND"
    assert verify("--once") == 0
    found = rows()
    assert {name: row["environment"][flag] for name, row in found.items()} == {
        **{"patched 1": "fa3", "reference 1": "off", "stock 1": "off"}
    }
    refuses = "refuse_prefill" in found["reference 1"]["environment"]["SGLANG_BCG_INSTRUMENTS"]
    assert refuses is (standard is Standard.BITS)
    assert found["patched 1"]["counts"]["attention inside"]["replayed"] == 4
    assert found["patched 1"]["equal"] == 5 and found["stock 1"]["verdict"] == "green"
    assert verify("--once", misbehaviour="patched=keeps its breaks") == 1
    assert rows()["patched 1"]["why"] == "proves nothing: no prefill was replayed with attention inside"


def test_a_reference_with_breaks_must_replay_them(verify: Verify, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", (dataclasses.replace(CASE, inside=True, standard=Standard.BREAKS),))
    # to the fake server the reference is a patched one
    assert verify("--once", misbehaviour="patched=never replays") == 1
    assert rows()["reference 1"]["why"] == "the reference replayed 0 times, 0 with attention inside"


@pytest.mark.parametrize(
    ("words", "more", "parts"),
    [
        (["--tp-size", "2"], {"--tp-size": 2}, 1),
        (["--tp-size", "2", "--dp-attention"], {"--tp-size": 2, "--dp-size": 2, "--enable-dp-attention": True}, 2),
    ],
)
def test_each_server_has_so_many_gpus(
    here: dict[str, object], verify: Verify, rows: Rows, words: list[str], more: dict[str, Any], parts: int
) -> None:
    here["gpu_count"] = 2
    assert verify("--once") == 0
    one = rows()["patched 1"]["flags"]
    assert not {*more} & {*one} and verify("--once", *words) == 0
    # a rank has a chunk as long as the largest graph
    chunk = {"--chunked-prefill-size": parts * one["--chunked-prefill-size"]}
    assert [row["flags"] for row in rows().values()] == [{**one, **chunk, **more}] * 3


def test_an_end_that_stock_comes_to_as_well_is_said_to_be_so(verify: Verify, rows: Rows) -> None:
    both = "stock=dies at start,patched=dies at start"
    assert verify("--quick", "--arms", "stock,patched", misbehaviour=both) == 1
    why = "as stock does: AssertionError: out_cache_loc_swa has different dtype"
    assert rows()["patched 1"]["why"].endswith(why)
    # the same end, and nothing to tell its cause by
    assert verify("--quick", "--arms", "stock,patched", misbehaviour="stock=crashes,patched=crashes") == 1
    assert "as stock does" not in rows()["patched 1"]["why"]
    assert verify("--quick", "--arms", "stock,patched", misbehaviour="patched=dies at start") == 1
    assert "as stock does" not in rows()["patched 1"]["why"]


@pytest.mark.parametrize(
    ("misbehaviour", "verdict", "said"),
    [
        (
            "patched=wrong tokens,padded=wrong tokens",
            "green",
            "padding changes the rounding: alone, 9 tokens: token 1 is",
        ),
        ("patched=wrong tokens", "red", "alone, 9 tokens: token 1 is"),
        ("patched=wrong tokens,padded=wrong logprobs", "red", "alone, 9 tokens: token 1 is"),
        ("patched=not a number,padded=not a number", "red", "a logprob is not a number"),
        ("patched=wrong tokens,padded=crashes", "red", "alone, 9 tokens: token 1 is"),
        ("patched=wrong tokens,padded=never replays", "red", "alone, 9 tokens: token 1 is"),
        ("patched=captures nothing", "red", "proves nothing: no prefill pass was replayed, and nothing was captured"),
    ],
)
def test_only_the_same_code_on_the_padded_batch_explains_a_difference(
    here: dict[str, object], verify: Verify, rows: Rows, misbehaviour: str, verdict: str, said: str
) -> None:
    here.update(root=str(wheels.unpacked("0.5.15.post1")), sglang="0.5.15.post1")
    assert verify("--quick", misbehaviour=misbehaviour) == (verdict == "red")
    found = rows()
    assert found["patched 1"]["verdict"] == verdict and said in found["patched 1"]["why"], found["patched 1"]
    # it is asked only where an answer differs
    assert ("padded 1" in found) == ("wrong tokens" in misbehaviour)


def test_where_sglang_cannot_run_the_code_on_the_padded_batch_a_difference_stays_red(
    verify: Verify, rows: Rows
) -> None:
    assert verify("--quick", misbehaviour="patched=wrong tokens,padded=wrong tokens") == 1
    assert "padded 1" not in rows()


def test_stock_counts_only_when_nothing_else_is_asked_for(verify: Verify) -> None:
    assert verify("--quick", "--arms", "stock,patched", misbehaviour="stock=wrong tokens") == 0
    assert verify("--quick", "--arms", "stock", misbehaviour="stock=wrong tokens") == 1


def test_what_the_check_of_a_server_said_is_told_beside_its_answers(
    verify: Verify, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify("--arms", "checked") == 0
    found = rows()["checked 1"]
    assert found["verdict"] == "green" and found["selfcheck"]["verdict"] == "wrong"
    assert found["environment"]["SGLANG_BCG_FIXES"] == "off"
    assert "self-check: wrong: it was noticed" in capsys.readouterr().out
    assert verify("--arms", "checked", misbehaviour="checked=wrong tokens") == 1
    assert rows()["checked 1"]["why"].startswith("self-check: wrong: it was noticed; alone, 9 tokens: token 1 is")
    assert "selfcheck" not in rows()["reference 1"]
    assert verify("--arms", "checked", misbehaviour="checked=says nothing") == 1
    assert rows()["checked 1"]["why"] == "its self-check reported nothing"


def test_a_fix_alone_is_the_only_one_that_is_on(
    here: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(environment, "look", lambda python: here)
    assert main.main(["verify", "--plan", "--fix", "linear_attention_captured", "--arms", "alone"]) == 0
    printed = capsys.readouterr().out
    headers = [line.split(":")[0] for line in printed.splitlines() if "/alone-" in line and line[:2] == "# "]
    shown_by = ("qwen3_next_prefill_graph", "qwen3_5_prefill_graph")
    assert headers == [f"# {case}/alone-linear_attention_captured" for case in shown_by]
    alone = "SGLANG_PLUGINS=bcg_fixes SGLANG_BCG_FIXES=off SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED=on "
    assert printed.count(alone) == len(shown_by) and "python -m sglang.launch_server --model-path" in printed
    # without a fix named, each that a case shows
    assert main.main(["verify", "--plan", "--arms", "alone"]) == 0
    every = [line.split(":")[0].partition("/")[2] for line in capsys.readouterr().out.splitlines() if line[:2] == "# "]
    assert len({name for name in every if name.startswith("alone-")}) >= 5
    assert not [name for name in every if name.startswith(("patched", "stock"))]


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({"gpu": None, "why": "torch sees none"}, [], "replay can be verified only with a GPU: torch sees none. Run"),
        ({"root": None}, [], "has no SGLang. In a checkout of sglang-bcg-fixes: python3 -m venv"),
        ({}, ["--release", "0.5.11"], f"has SGLang {RELEASE}, not 0.5.11, and nothing is installed unasked. In a"),
        ({"has_entry_point": False}, [], "would not find this plugin"),
        ({"free_gib": 2.0}, [], "2.0 GiB are free on a GPU"),
        ({}, ["--case", "a_cas"], "no case 'a_cas'; did you mean a_case?"),
        ({}, ["--fix", "linear_attention"], "no defect 'linear_attention'; did you mean linear_attention_captured?"),
        ({}, ["--arms", "patchd"], "no arm 'patchd'; did you mean patched?"),
        ({}, ["--tp-size", "2"], "--tp-size 2: "),
        ({}, ["--dp-attention"], "--dp-attention needs --case NAME or --fix ID"),
        ({}, ["--dp-attention", "--case", "a_case"], "--dp-attention needs --tp-size N"),
        ({}, ["--flag", "FIXES=off"], "--flag FIXES=off: name a flag and its value, as in `--flag SGLANG_BCG_"),
    ],
)
def test_what_cannot_be_run_is_said_with_what_to_do(
    here: dict[str, object], change: dict[str, object], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here.update(change)
    assert main.main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_interpreter_without_a_gpu_says_so() -> None:
    done = processes.python("-m", "sglang_bcg_fixes", "verify", paths=[wheels.unpacked(RELEASE)])
    assert done.returncode == 2 and "only with a GPU: torch" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("misbehaviour", "hangs"),
    [("patched=hangs at start", "patched-1"), ("patched=wrong tokens,stock=hangs at start", "stock-1")],
)
def test_an_end_from_outside_ends_the_servers_and_leaves_no_files(
    here: dict[str, object], tmp_path: pathlib.Path, misbehaviour: str, hangs: str
) -> None:
    # where a difference would be asked about in one more server
    here.update(root=str(wheels.unpacked("0.5.15.post1")), sglang="0.5.15.post1")
    own = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(processes.REPOSITORY), "MISBEHAVIOUR": misbehaviour}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scenarios.verify_one_case", json.dumps(here)],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"*/a_case/{hangs}/reports/1.passes")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    # the others answer in the meantime
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and b"interrupted; this is what there is so far" in err
    assert b"red\n" in out and b"  interrupted\n" in out and b"padded" not in out
    running = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running and not list(tmp_path.iterdir())
