# SPDX-License-Identifier: Apache-2.0
"""The one line of a process that runs a real release's model: what concerns it, by its configuration and flags."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import serve
import serve_server

from tests import processes
from tests.wheels import NEWEST, RELEASES

Root = Callable[[str], pathlib.Path]


def found(root: pathlib.Path, *arguments: str) -> Any:
    return processes.beside(root, "-m", "tests.scenarios.one_line_released", *arguments)[0]


@pytest.mark.parametrize(
    ("release", "model", "architecture", "concerned", "another"),
    [
        ("0.5.12.post1", "qwen3next", "Qwen3NextForCausalLM", "linear_attention_captured", "ssm_mixer_captured"),
        ("0.5.15.post1", "falcon_h1", "FalconH1ForCausalLM", "ssm_mixer_captured", "stack_call_signature"),
        (NEWEST, "falcon_h1", "FalconH1ForCausalLM", "ssm_mixer_captured", "dots3_attention_captured"),
    ],
)
def test_a_model_is_known_and_what_concerns_it(
    release_root: Root, release: str, model: str, architecture: str, concerned: str, another: str
) -> None:
    said = found(release_root(release), "one_prefill", model)
    [[level, line]] = said["said"]
    assert said["model"] == architecture and concerned in said["concerned"] and another not in said["concerned"], said
    assert level == "INFO" and line.startswith(f"bcg-fixes 0.1.0: sglang {release} {architecture} TP0: "), line
    assert "0 fixes live" not in line and " live, 0 unread, 0 lost; " in line and len(line) <= 200, line


@pytest.mark.parametrize("release", RELEASES)
def test_a_plain_launch_is_of_no_more_concern_to_its_process_than_to_doctor(release_root: Root, release: str) -> None:
    said = found(release_root(release), "launch", "llama", "--device", "cpu")
    # SGLang may have decided what the words of a command leave open
    assert set(said["served"]) <= set(said["doctor"]), said
    assert bool(said["doctor"]) == (release in ("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17")), said
    if RELEASES.index(release) >= RELEASES.index("0.5.19"):
        # it keeps there what was given apart from what it resolves
        assert set(said["options"]) == {"--model-path", "--device"}, said


@pytest.mark.parametrize("release", ["0.5.17", NEWEST])
def test_the_json_for_all_graphs_wins_in_a_process_as_it_does_in_doctor(release_root: Root, release: str) -> None:
    json_of_full = '{"prefill": {"backend": "full", "bs": [64]}, "decode": {"backend": "disabled"}}'
    flags = ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-config", json_of_full)
    said = found(release_root(release), "launch", "llama", "--device", "cpu", *flags)
    assert set(said["served"]) <= set(said["doctor"]), said
    resolved = {
        "--cuda-graph-backend-prefill": ["full"],
        "--cuda-graph-backend-decode": ["disabled"],
        "--cuda-graph-bs-prefill": ["64"],
    }
    kept_apart = {"--cuda-graph-backend-prefill": ["disabled"], "--cuda-graph-config": [json_of_full]}
    assert (kept_apart if release == NEWEST else resolved).items() <= said["options"].items()


# both read the function that is changed
UNREAD = ["linear_attention_captured", "linear_tail_uninitialised"]


@pytest.mark.parametrize(("model", "unread"), [("qwen3next", UNREAD), ("llama", [])])
def test_an_unread_source_is_a_warning_for_the_models_that_can_meet_the_defect(
    drifted_root: pathlib.Path, model: str, unread: list[str]
) -> None:
    *warned, [_, line] = found(drifted_root, "one_prefill", model)["said"]
    assert [level for level, _ in warned] == len(unread) * ["WARNING"], warned
    told = sorted(text.partition(" is not applied (unread): ")[0] for _, text in warned)
    assert told == [f"bcg-fixes: {name}" for name in unread]
    assert f", {len(unread)} unread, 0 lost; " in line, line


def test_a_real_server_logs_one_line_and_status_says_that_it_is_well(
    release_root: Root, tmp_path: pathlib.Path
) -> None:
    reports = {"SGLANG_BCG_REPORT_DIR": str(tmp_path / "reports")}
    environment = processes.environment_of(
        [release_root(NEWEST)], {**processes.ON_CPU, **processes.WITHOUT_KERNELS, **reports}
    )
    port = serve.free_port()
    model = processes.REPOSITORY / "cpu_sglang" / "models" / "llama"
    command = [*serve.command(pathlib.Path(sys.executable), NEWEST, False, model, port), "--load-format=dummy"]
    server = serve_server.Server(command, environment, tmp_path, f"http://127.0.0.1:{port}")
    try:
        server.wait_until_healthy(400)
        server.generate(serve.PROMPT, 2, limit_s=120)
        told = processes.python("-m", "sglang_bcg_fixes", "status", "--require", environment=environment)
        machine = processes.python("-m", "sglang_bcg_fixes", "status", "--json", environment=environment)
    finally:
        server.stop()
    [line] = [line for line in server.lines() if "bcg-fixes " in line]
    assert f"bcg-fixes 0.1.0: sglang {NEWEST} LlamaForCausalLM TP0: " in line and len(line) <= 222, line
    assert "; self-check no graphs; " in line
    [status] = told.stdout.splitlines()
    assert told.returncode == 0 and status.startswith(f"OK     LlamaForCausalLM :{port}  "), status
    found = json.loads(machine.stdout)
    assert found["format"] == 2 and [each["verdict"] for each in found["servers"]] == ["OK"]
    [scheduler] = [each for each in found["processes"] if each["model"]]
    assert (scheduler["port"], scheduler["rank"], scheduler["batches"] > 0) == (port, "TP0", True)


def test_each_rank_has_its_own_line(release_root: Root) -> None:
    said = found(release_root(NEWEST), "of_ranks", "llama")
    assert [[level for level, _ in lines] for lines in said] == 2 * [["INFO"]], said
    for number, [[_, line]] in enumerate(said):
        assert f" LlamaForCausalLM TP{number}: " in line, line
