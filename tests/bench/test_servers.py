# SPDX-License-Identifier: Apache-2.0
"""Servers that are asked in turn, with servers that misbehave; tests/verify/fake_engine.py says how."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Collection

import pytest

from benchmarks.bench import command, rows, servers
from sglang_bcg_fixes.lab.verify import cases
from sglang_bcg_fixes.lab.verify import command as verify
from sglang_bcg_fixes.lab.verify.servers import FINISHED, Outcome, outcome
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source import releases
from tests import processes
from tests.wheels import NEWEST

PATCHED, KERNEL, KERNEL_TRITON, CANARY, REFUSED, EAGER, STOCK = servers.ARMS.values()

Measure = Callable[..., tuple[list[rows.Row], list[str]]]


@pytest.fixture
def measure(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Measure:
    monkeypatch.setattr(verify, "ENGINE", "tests.verify.fake_engine")
    monkeypatch.setattr(servers, "LENGTHS", (5, 9))
    monkeypatch.setattr(servers, "ANSWER_LIMIT", 3.0)
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))
    source = releases.in_folder(release_root("0.5.12.post1"))

    def measure(misbehaviour: str, arms: Collection[str] = servers.BY_DEFAULT) -> tuple[list[rows.Row], list[str]]:
        monkeypatch.setenv("MISBEHAVIOUR", misbehaviour)
        said: list[str] = []
        made = servers.measure(sys.executable, registry.discover(), source, tmp_path, 5, said.append, arms=arms)
        return [row for some in made for row in some], said

    return measure


def test_right_servers_are_timed_in_turn(measure: Measure) -> None:
    found, said = measure("")
    assert [(row.arm, row.measured, row.tokens) for row in found] == [
        (arm, measured, length)
        for measured, length in (
            (servers.FIRST_TOKEN, 5),
            (servers.FIRST_TOKEN, 9),
            (servers.THROUGHPUT, servers.PROMPT),
        )
        for arm in (PATCHED, KERNEL, CANARY, REFUSED, EAGER, STOCK)
    ]
    assert all(row.verdict == "green" and row.median and row.rounds == 5 for row in found), said
    # a warm-up and five rounds
    assert all(row.details["prefill_passes"] in ({"replayed": 6}, {"refused": 6}) for row in found)
    assert {row.arm for row in found if "refused" in row.details["prefill_passes"]} == {REFUSED}
    printed = "\n".join(command.report(found))
    lines = [line.split("  ") for line in printed.splitlines() if f"{PATCHED}  " in line]
    assert len(lines) == 3 and all(line[-1].strip() != "-" for line in lines)
    assert f"{PATCHED}: prefill graphs captured in 1.2 s" in printed


def test_two_forms_of_a_kernel_are_timed_side_by_side(measure: Measure) -> None:
    found, said = measure("", ["kernel", "kernel_triton", "eager"])
    assert {row.arm for row in found} == {KERNEL, KERNEL_TRITON, REFUSED, EAGER}
    assert all(row.verdict == "green" and row.median for row in found), said
    lines = [line.split("  ") for line in command.report(found)]
    for arm in (KERNEL, KERNEL_TRITON):
        mine = [line for line in lines if arm in map(str.strip, line)]
        assert len(mine) == 3 and all(float(line[-1]) > 0 for line in mine)


def test_servers_whose_form_leaves_a_part_to_another_prove_nothing(measure: Measure) -> None:
    found, _ = measure("patched=leaves a part to Triton", ["patched", "kernel", "kernel_triton"])
    why = {row.arm: row.why for row in found}
    left = "proves nothing: gdn_extend is left to other code here: advance, to Triton"
    assert why == {PATCHED: "", KERNEL: left, KERNEL_TRITON: left, REFUSED: ""}


@pytest.mark.parametrize(
    "line",
    [
        "Capture piecewise CUDA graph end. Time elapsed: 3.50 s. mem usage=0.25 GB. avail mem=60.00 GB.",
        "Capture target prefill CUDA graph end. elapsed=3.50 s, mem usage=0.25 GB, avail mem=60.00 GB.",
    ],
)
def test_what_a_capture_costs_is_read_from_every_releases_log(line: str) -> None:
    decode = "Capture target decode CUDA graph end. elapsed=9.00 s, mem usage=9.00 GB, avail mem=60.00 GB."
    assert servers.capture_of(f"[2026] {decode}\n[2026] {line}\n") == {"seconds": 3.5}
    assert servers.capture_of(decode) is None


@pytest.mark.parametrize(
    ("misbehaviour", "why"),
    [
        ("stock=wrong tokens", "alone, 253 tokens: token 1 is"),
        ("stock=crashes", "ended by signal 9"),
        ("stock=dies at start", "exit status 1 before it served"),
        ("stock=hangs", "no answer within 3 s"),
        ("stock=never replays", "proves nothing: no prefill pass was replayed"),
    ],
)
def test_a_red_server_has_no_time_and_the_others_have(measure: Measure, misbehaviour: str, why: str) -> None:
    found, said = measure(misbehaviour)
    stock = [row for row in found if row.arm == STOCK]
    assert len(stock) == 3 and all(row.verdict == "red" and why in row.why and row.median is None for row in stock)
    assert all(row.verdict == "green" and row.median for row in found if row.arm != STOCK), said
    printed = "\n".join(command.report(found))
    assert all(line.split()[-1] == "-" for line in printed.splitlines() if STOCK in line and "red" not in line)
    assert f"red, and so without times: {STOCK}" in printed and why in printed


def test_qwen3_5_is_started_as_users_start_it_and_asked_nothing_twice(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    case = servers.CASES["qwen3_5_4b"]
    source = releases.in_folder(release_root(NEWEST))
    runs = servers.runs_of(registry.discover(), source, tmp_path, case)
    assert [run.arm for run in runs] == ["patched", "kernel", "canary", "reference", "eager", "stock"]
    given = {run.arm: set(run.server.job["engine"]) for run in runs}
    # sizes, and what says which model it is
    sizes = {
        "max_running_requests",
        "max_total_tokens",
        "max_mamba_cache_size",
        "mem_fraction_static",
        "context_length",
    }
    assert given["patched"] - sizes == {"model_path", "log_level", "skip_tokenizer_init"}
    assert given["eager"] - given["patched"] == {"cuda_graph_backend_prefill"}
    assert all(run.server.job["engine"]["model_path"].endswith("qwen3_5_4b") for run in runs)
    # the longest prompt and what is answered
    assert runs[0].server.job["engine"]["context_length"] > max(servers.LENGTHS) + cases.NEW_TOKENS
    prompts = [prompt for call in runs[0].calls for prompt in call.prompts]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.17", NEWEST])
@pytest.mark.parametrize(
    ("name", "flag", "forms"),
    [
        ("qwen3_next", "SGLANG_BCG_KERNEL_GDN_EXTEND", ["cuda", "triton"]),
        ("nemotron_h_8b", "SGLANG_BCG_KERNEL_MAMBA2_EXTEND", ["cuda", "triton"]),
        ("falcon_h1_7b", "SGLANG_BCG_KERNEL_MAMBA2_EXTEND", ["cuda", "triton"]),
        ("granite_4_h_micro", "SGLANG_BCG_KERNEL_MAMBA2_EXTEND", ["cuda", "triton"]),
        ("lfm2_1_2b", "SGLANG_BCG_KERNEL_SHORT_CONV_EXTEND", ["triton"]),
        ("kimi_linear_48b", "SGLANG_BCG_KERNEL_KDA_EXTEND", ["triton"]),
    ],
)
def test_the_kernel_of_a_model_is_all_that_its_servers_have_more(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    release: str,
    name: str,
    flag: str,
    forms: list[str],
) -> None:
    known, source = registry.discover(), releases.in_folder(release_root(release))
    runs = {run.arm: run for run in servers.runs_of(known, source, tmp_path, servers.CASES[name], servers.ARMS)}
    given = {arm: run.server.environment for arm, run in runs.items()}
    jobs = {arm: run.server.job["engine"] for arm, run in runs.items()}
    inside = [arm for arm in runs if arm.startswith("kernel")]
    for arm, form in zip(inside, forms, strict=True):
        assert given[arm] == {**given["patched"], flag: form} and jobs[arm] == jobs["patched"]
    assert len({run.server.folder for run in runs.values()}) == len(runs)
    off = {kernel.flag: "off" for kernel in known.kernels if not kernel.bit_exact}
    assert flag in off and off.items() <= given["patched"].items()
    assert given["patched"]["SGLANG_BCG_FIXES"] == "auto"
    assert jobs["patched"]["model_path"].endswith(f"/{name}")
    admitted = {"SGLANG_BCG_FIX_HYBRIDS_WITHOUT_GRAPHS": "on"}
    refused = {"granite_4_h_micro", "lfm2_1_2b", *(("nemotron_h_8b",) if release == NEWEST else ())}
    if name in refused:
        # SGLang's own has no graphs there
        assert "stock" not in runs and all(admitted.items() <= each.items() for each in given.values())
    else:
        assert given["stock"]["SGLANG_BCG_FIXES"] == "off" and jobs["stock"] == jobs["patched"]
        assert not any(admitted.keys() & each.keys() for each in given.values())
    assert jobs["patched"]["cuda_graph_bs_prefill"] == servers.BUCKETS
    assert jobs["patched"]["chunked_prefill_size"] > max(servers.LENGTHS)
    assert jobs["eager"]["cuda_graph_backend_prefill"] == "disabled"
    assert all(source.has_option(f"--{option.replace('_', '-')}") for job in jobs.values() for option in job)
    # most hybrid models do not start with Triton's
    assert jobs["patched"].get("attention_backend") == ("triton" if name == "qwen3_next" else None)


@pytest.mark.parametrize(("arm", "form"), [("kernel", "cuda"), ("kernel_triton", "triton")])
@pytest.mark.parametrize(("name", "kernel"), [("qwen3_next", "gdn_extend"), ("falcon_h1_7b", "mamba2_extend")])
def test_a_kernel_that_does_not_run_as_it_was_named_proves_nothing(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, name: str, kernel: str, arm: str, form: str
) -> None:
    source = releases.in_folder(release_root("0.5.15.post1"))
    case = servers.CASES[name]
    run = next(each for each in servers.runs_of(registry.discover(), source, tmp_path, case, [arm]) if each.arm == arm)
    run.server.reports.mkdir(parents=True)

    def why(ran: str, **left: list[str]) -> str:
        row = {"state": "applied", "left": [], "to_triton": []}
        kernels = {"another_kernel": row | {"impl": "cuda", "left": ["no reason"]}}
        kernels |= {kernel: row | {"impl": ran} | left} if ran else {}
        (run.server.reports / "1.json").write_text(json.dumps({"fixes": [], "kernels": kernels}))
        run.server.log.write_text("")
        return servers.why_not_inside(run, outcome(run.server, FINISHED, 0))

    assert why(form) == ""
    left = f"proves nothing: {kernel} is left to other code here: "
    assert why(form, left=["strided state pools"]) == f"{left}strided state pools"
    assert why(form, to_triton=["states in bfloat16"]) == f"{left}states in bfloat16, to Triton"
    flag = f"SGLANG_BCG_KERNEL_{kernel.upper()}"
    another = "triton" if form == "cuda" else "cuda"
    for ran, told in ((another, another), ("", "none")):
        assert why(ran) == f"proves nothing: {flag}={form}, and the form that runs is {told}"


def test_a_release_that_does_not_serve_the_model_is_refused(
    release_root: Callable[[str], pathlib.Path],
) -> None:
    options = argparse.Namespace(model="qwen3_5_4b", python=sys.executable)
    source = releases.in_folder(release_root("0.5.12.post1"))
    with pytest.raises(command.BenchError, match=r"--model qwen3_5_4b: SGLang 0\.5\.12\.post1 does not serve it"):
        next(command.server_rows(options, source, servers.GIB * len(servers.BY_DEFAULT), 5, list(servers.BY_DEFAULT)))


@pytest.mark.parametrize(
    ("name", "arms", "needed"),
    [
        ("qwen3_5_4b", ["stock", "kernel"], 60),
        ("qwen3_5_4b", ["reference", "kernel"], 40),
        # an H100 has room for them
        ("falcon_h1_7b", ["patched", "kernel", "eager"], 48),
        ("falcon_h1_7b", ["patched", "kernel", "kernel_triton", "eager"], 60),
    ],
)
def test_chosen_servers_are_started_beside_the_reference(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, name: str, arms: list[str], needed: int
) -> None:
    source = releases.in_folder(release_root(NEWEST))
    case = servers.CASES[name]
    runs = servers.runs_of(registry.discover(), source, tmp_path, case, arms)
    assert {run.arm for run in runs} == {*arms, "reference"}
    options = argparse.Namespace(model=name, python=sys.executable)
    with pytest.raises(command.BenchError, match=f"the servers need {needed} together.*--arms"):
        next(command.server_rows(options, source, needed - 1, 5, arms))


def options(**given: str) -> argparse.Namespace:
    return command.parser().parse_args([f"--{name}={value}" for name, value in given.items()])


def test_what_cannot_be_run_exits_2_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--arms", "stock,patchd"]) == 2
    assert capsys.readouterr().err.startswith("bench: no arm 'patchd'")


def test_an_unknown_arm_is_refused_before_anything_runs() -> None:
    with pytest.raises(command.BenchError, match=r"no arm 'patchd'.*patched.*there are patched, kernel"):
        command.choose(options(arms="stock,patchd"))


def test_six_arms_are_the_default_and_the_second_form_is_by_name() -> None:
    assert options().arms == "patched,kernel,canary,reference,eager,stock"
    for name in ("qwen3_next", "qwen3_5_4b", "nemotron_h_8b", "falcon_h1_7b", "granite_4_h_micro"):
        _, arms, _ = command.choose(options(model=name, arms="kernel,kernel_triton"))
        assert arms == ["kernel", "kernel_triton"]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("lfm2_1_2b", "short_conv_extend"),
        ("kimi_linear_48b", "kda_extend"),
    ],
)
def test_a_second_form_of_a_kernel_that_has_one_is_refused(name: str, kernel: str) -> None:
    with pytest.raises(
        command.BenchError, match=f"--arms kernel_triton: {kernel}, which --model {name} has"
    ) as refused:
        command.choose(options(model=name, arms="kernel,kernel_triton"))
    others = "qwen3_next, qwen3_5_4b, nemotron_h_8b, falcon_h1_7b, granite_4_h_micro"
    assert f"leave that arm out, or choose one of {others} with --model" in str(refused.value)
    assert command.choose(options(model=name))[1] == list(servers.BY_DEFAULT)


def test_without_bits_an_answer_is_right_that_is_near_and_has_checked_itself() -> None:
    def answered(
        *logprobs: float, again: float | None = None, replayed: str = "replayed", said: str = "right"
    ) -> Outcome:
        values = [*logprobs, logprobs[0] if again is None else again]
        calls = [
            {"answers": [{"tokens": [7], "logprobs": [value], "top": [[[value, 7], [value - 9, 8]]]}]}
            for value in values
        ]
        found = {"verdict": said} if said else None
        return Outcome("finished", 0, 0, calls, [["prefill", replayed, 8, 1, 8]], [], [], found)

    script = cases.Script()
    first = script.ask("alone", [3], 1)
    script.ask("alone", [4], 1)
    script.ask_again("again", first)
    reference = answered(-1.0, -2.0, replayed="refused")

    def why(mine: Outcome) -> str:
        return servers.why_wrong(script.calls, mine, reference)

    assert why(answered(-1.0, -2.0, said="")) == ""
    assert why(answered(-1.0, -2.1)) == ""
    assert "self-check: wrong" in why(answered(-1.0, -2.1, said="wrong"))
    assert "self-check: none" in why(answered(-1.0, -2.1, said=""))
    assert "off by 2.5, where 2.0 is near" in why(answered(-1.0, -4.5))
    assert "asked again" in why(answered(-1.0, -2.1, again=-1.01))
    assert "proves nothing" in why(answered(-1.0, -2.1, replayed="refused"))


def test_without_a_sound_reference_nothing_is_timed(measure: Measure) -> None:
    found, _ = measure("reference=replays")
    patched = [row for row in found if row.arm == PATCHED]
    assert all(row.median is None and "the reference replayed" in row.why for row in patched)
