# SPDX-License-Identifier: Apache-2.0
"""The self-check on released SGLang's own runners and pools, on the CPU: it knows no defect and finds them all."""

from __future__ import annotations

from typing import Any

import pytest

from tests import processes, wheels
from tests.wheels import NEWEST

RIGHT = (
    ("0.5.11", "qwen3next"),
    ("0.5.12.post1", "qwen3next"),
    ("0.5.14", "llama"),
    ("0.5.15.post1", "falcon_h1"),
    ("0.5.17", "cohere"),
    ("0.5.19", "gpt_oss", '{"attention_backend": "fa3", "dtype": "bfloat16"}'),
    ("0.5.21", "llama", '{"page_size": 4}'),
    (NEWEST, "qwen3next"),
)
# with every fix off, by release: what is wrong, and where the check must see it first
DEFECTS = (
    ("0.5.11", "qwen3next", "garbage", "illegal memory access"),
    ("0.5.11", "qwen3next", "kept", "model.layers.0 (Qwen3HybridLinearDecoderLayer)"),
    ("0.5.12.post1", "qwen3next", "garbage", "illegal memory access"),
    ("0.5.12.post1", "qwen3next", "kept", "model.layers.0 (Qwen3HybridLinearDecoderLayer)"),
    ("0.5.15.post1", "falcon_h1", "kept", "model.layers.0 (FalconH1HybridAttentionDecoderLayer)"),
)


def checked(release: str, model: str, *options: str, mode: str = "warn", **environ: str) -> tuple[dict[str, Any], str]:
    arguments = ("-m", "tests.releases.selfcheck_run", model, *options)
    return processes.beside(
        wheels.unpacked(release), *arguments, timeout=300, environment={"SGLANG_BCG_SELFCHECK": mode, **environ}
    )


@pytest.mark.parametrize("server", RIGHT, ids=lambda server: "-".join(server[:2]))
def test_right_graphs_are_called_right_and_nothing_is_left_behind(server: tuple[str, ...]) -> None:
    release, model, arguments = (*server, "{}")[:3]
    found, log = checked(release, model, "--server", arguments, mode="strict")
    verdicts = {row["batch"].partition(" (")[0]: row["verdict"] for row in found["selfcheck"]["batches"]}
    assert found["selfcheck"]["verdict"] == "right" and found["refused"] is None, found
    assert set(verdicts.values()) == {"right"} and len(verdicts) == 7, verdicts
    assert found["touched"] == [] and found["compared"] > 20
    assert found["prefills"][0]["replays"] > 0 and found["prefills"][0]["equal"]
    assert "bcg-fixes self-check: right: 7 of 7 compared" in log


@pytest.mark.parametrize(("release", "model", "freed_memory", "where"), DEFECTS)
def test_released_defects_are_found_without_knowing_them_and_prefill_runs_eagerly(
    release: str, model: str, freed_memory: str, where: str
) -> None:
    found, log = checked(release, model, "--freed-memory", freed_memory, SGLANG_BCG_FIXES="off")
    assert found["selfcheck"]["verdict"] == "wrong" and where in found["selfcheck"]["reason"], found["selfcheck"]
    assert found["refused"] is None and found["prefills"] == [{"equal": True, "replays": 0}]
    # a graph that writes to states of nobody's did so here, too
    assert set(found["touched"]) <= {"asked", "MambaPool.mamba_cache", "State.conv", "State.temporal"}
    assert "Prefill runs eagerly in this server from now on" in log and "`bcg-fixes explain " in log


def test_strict_refuses_to_serve() -> None:
    options = ("--freed-memory", "kept")
    found, _log = checked("0.5.12.post1", "qwen3next", *options, mode="strict", SGLANG_BCG_FIXES="off")
    assert "bcg-fixes refuses to serve (SGLANG_BCG_SELFCHECK=strict): self-check: wrong" in found["refused"]
    assert "SGLANG_BCG_SELFCHECK=warn" in found["refused"]


@pytest.mark.parametrize(
    ("broken", "right", "words"),
    [
        ("stale positions", 0, "keys of model.layers.0 (LlamaDecoderLayer): off by"),
        # the largest, which was captured first, is replayed last but one
        ("earlier bucket", 5, "replaying ended in RuntimeError"),
    ],
)
def test_what_no_release_does_wrong_is_found_too(broken: str, right: int, words: str) -> None:
    found, _log = checked(NEWEST, "llama", "--break", broken)
    verdicts = [row["verdict"] for row in found["selfcheck"]["batches"]]
    assert found["selfcheck"]["verdict"] == "wrong" and words in found["selfcheck"]["reason"], found["selfcheck"]
    assert verdicts.count("right") == right and found["prefills"] == [{"equal": True, "replays": 0}]


@pytest.mark.parametrize(("broken", "replays"), [((), 1), (("--break", "attention inside"), 3)], ids=["right", "wrong"])
def test_graphs_with_attention_inside_are_checked_beside_those_with_breaks(
    broken: tuple[str, ...], replays: int
) -> None:
    options = ("--server", '{"attention_backend": "fa3"}', *broken)
    found, log = checked(NEWEST, "llama", *options, mode="strict", SGLANG_BCG_KERNEL_ATTENTION_EXTEND="fa3")
    assert found["selfcheck"]["verdict"] == "right" and found["selfcheck"]["short"] == "right 7/7", found["selfcheck"]
    assert found["prefills"] == [{"equal": True, "replays": replays}] and found["touched"] == []
    dropped = "attention_extend: prefill is replayed from SGLang's own graphs: the self-check found another answer"
    assert (dropped in log) == bool(broken)


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_a_check_that_cannot_run_says_so_and_changes_nothing(mode: str) -> None:
    found, log = checked(NEWEST, "llama", "--break", "eager", mode=mode)
    assert found["selfcheck"]["verdict"] == "not checked" and "TypeError" in found["selfcheck"]["reason"]
    assert (found["refused"] is None) == (mode == "warn")
    assert found["touched"] == [] and "Traceback" in log


def test_without_time_for_all_the_cheapest_is_checked() -> None:
    found, _log = checked(NEWEST, "llama", "--seconds", "0")
    assert found["selfcheck"]["verdict"] == "right"
    assert [row["batch"].partition(" (")[0] for row in found["selfcheck"]["batches"]] == ["smallest bucket"]
    assert found["selfcheck"]["reason"].startswith("1 of 7 compared, 6 left out: time; ")
    assert found["selfcheck"]["short"] == "right 1/7"


@pytest.mark.parametrize("broken", ["slots stay taken", "slots stay written"])
def test_a_check_that_left_traces_would_be_seen(broken: str) -> None:
    found, _log = checked(NEWEST, "llama", "--break", broken)
    assert found["touched"], found


def test_the_canary_answers_rightly_and_turns_wrong_graphs_off() -> None:
    options = ("--no-check", "--prefills", "5", "--freed-memory", "kept")
    environ = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_CANARY": "2"}
    found, log = checked("0.5.12.post1", "qwen3next", *options, mode="off", **environ)
    served = [(row["equal"], row["replays"] > 0) for row in found["prefills"]]
    # wrong and not looked at, looked at and right, and eager from then on
    assert served == [(False, True), (True, True), (True, False), (True, False), (True, False)], found["prefills"]
    assert found["selfcheck afterwards"]["verdict"] == "wrong" and found["canary"] == {"every": 2, "compared": 1}
    assert "`bcg-fixes explain linear_attention_captured`" in log


def test_the_check_sees_what_is_replayed_also_where_every_prefill_is_compared() -> None:
    environ = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_CANARY": "1"}
    found, _log = checked("0.5.12.post1", "qwen3next", "--freed-memory", "kept", mode="warn", **environ)
    assert found["selfcheck"]["verdict"] == "wrong" and not found["canary"], found


@pytest.mark.parametrize(("release", "model"), [("0.5.12.post1", "qwen3next"), (NEWEST, "llama")])
def test_the_canary_leaves_right_graphs_alone(release: str, model: str) -> None:
    found, log = checked(release, model, "--no-check", "--prefills", "5", mode="off", SGLANG_BCG_CANARY="2")
    assert all(row["equal"] and row["replays"] for row in found["prefills"]), found["prefills"]
    assert found["canary"] == {"every": 2, "compared": 2} and "self-check: wrong" not in log


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("admitted, then eager", "the graph runner admitted a prefill that then ran eagerly"),
        ("refused, then replayed", "a graph was replayed although it was refused"),
    ],
)
def test_the_canary_has_compared_nothing_where_one_run_was_not_what_it_should_be(broken: str, said: str) -> None:
    options = ("--no-check", "--prefills", "3", "--break", broken)
    found, log = checked("0.5.12.post1", "llama", *options, mode="off", SGLANG_BCG_CANARY="1")
    assert all(row["equal"] for row in found["prefills"]), found["prefills"]
    assert not found["canary"] and log.count(f"SGLANG_BCG_CANARY did not compare a prefill: {said}") == 1
