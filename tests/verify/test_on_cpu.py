# SPDX-License-Identifier: Apache-2.0
"""The whole command without a GPU: a real SGLang's runner and prefill graphs, on the tape that stands in for CUDA's."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cpu_sglang import architectures
from sglang_bcg_fixes.cli import main
from sglang_bcg_fixes.fixes import hybrids_without_graphs as fix
from sglang_bcg_fixes.lab.verify import cases, command, compare, environment, models, servers
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes
from tests.verify import forked
from tests.wheels import NEWEST

BUCKETS = (8, 16)


def few_calls(buckets: Sequence[int]) -> list[cases.Call]:
    script = cases.Script()
    script.tokens = lambda length: tuple(script.random.randrange(2, 100) for _ in range(length))  # type: ignore[method-assign]
    first = script.ask("alone", [11], 2)
    script.ask("alone", [8], 2)
    script.ask("together", [5, 3], 2)
    script.ask_again("larger after smaller", first)
    return script.calls


def use_engine(monkeypatch: pytest.MonkeyPatch, is_forked: bool) -> None:
    """Have the servers be ours, forked or each in a new Python as on a user's machine."""
    monkeypatch.setattr(command, "ENGINE", "tests.verify.forked_engine" if is_forked else "tests.verify.cpu_engine")
    if is_forked:
        monkeypatch.setattr(servers, "subprocess", forked.SUBPROCESS)


def looked_at(root: pathlib.Path, release: str) -> dict[str, Any]:
    """An interpreter with this release, as if it had a GPU."""
    with_gpu = {"gpu": "none", "gpu_count": 1, "free_gib": 8}
    return {"root": str(root), "sglang": release, "has_entry_point": True, "versions": {}, **with_gpu}


@pytest.mark.parametrize(("release", "arms"), [("0.5.12.post1", "stock,patched"), (NEWEST, "patched")])
def test_real_runners_replay_and_refuse(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    release: str,
    arms: str,
) -> None:
    root = release_root(release)
    case = cases.Case("tiny", "A test.", "qwen3_next", script=few_calls, decode_sizes=(1, 2, 4))
    monkeypatch.setattr(cases, "CASES", (case,))
    monkeypatch.setattr(cases, "FEW_BUCKETS", BUCKETS)
    monkeypatch.setattr(environment, "look", lambda python: looked_at(root, release))
    monkeypatch.setattr(command, "make_models", lambda *_: None)
    use_engine(monkeypatch, is_forked=release == NEWEST)
    paths = [root, processes.REPOSITORY]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # as if it differed, so that the code is run on the padded batch, too
    monkeypatch.setattr(command, "has_unexplained_difference", lambda *_: True)
    file = tmp_path / "found.json"
    words = ["verify", "--case", "tiny", "--quick", "--arms", arms, "--jobs", "1", "--json", str(file)]
    status = main.main(words)
    printed = capsys.readouterr().out
    found = {row["arm"]: row for row in json.loads(file.read_text())["servers"]}
    prefills = {arm: row["counts"]["prefill"] for arm, row in found.items()}

    assert status == 0, printed
    assert found["patched"]["verdict"] == "green" and found["patched"]["equal"] == found["patched"]["requests"] == 5
    assert prefills["patched"]["replayed"] == 4 and prefills["patched"]["refused"] == 0
    assert prefills["patched"]["by bucket"] == {"16": 2, "8": 2} and prefills["patched"]["by requests"]["2"] == 1
    assert prefills["reference"]["replayed"] == 0 and prefills["reference"]["reasons"] == {"for the reference": 4}
    assert prefills["patched"]["captured"] == prefills["reference"]["captured"] == len(BUCKETS)
    if release == NEWEST:
        assert prefills["padded"]["replayed"] == 4 and found["padded"]["equal"] == 5
    if "stock" in arms:
        assert "linear_attention_captured" in found["patched"]["applied"] and not found["stock"]["applied"]
        assert found["stock"]["verdict"] == "red" and found["stock"]["equal"] < 5, printed


def make_smaller_models(python: str, chosen: Sequence[cases.Case], folder: pathlib.Path) -> None:
    for case in chosen:
        model = models.MODELS[case.model]
        smaller = architectures.CONFIGURATIONS[model.architecture].config
        layers = {"num_hidden_layers": len(model.layers), "layer_types": model.config["layer_types"]}
        made = folder / "models" / case.model
        made.mkdir(parents=True)
        made.joinpath("config.json").write_text(
            json.dumps({**smaller, "architectures": [model.architecture], **layers})
        )


# where triton attention ends a server whose first layer is a mixer, and where it does not
@pytest.mark.parametrize("release", ["0.5.15.post1", NEWEST])
def test_hybrids_that_begin_with_a_mixer_are_served_and_replayed(
    release_root: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    release: str,
) -> None:
    root = release_root(release)
    chosen = [
        dataclasses.replace(case, script=few_calls) for case in cases.CASES if case.name in declared_in(fix).verify
    ]
    monkeypatch.setattr(cases, "CASES", chosen)
    monkeypatch.setattr(cases, "FEW_BUCKETS", BUCKETS)
    monkeypatch.setattr(environment, "look", lambda python: looked_at(root, release))
    monkeypatch.setattr(command, "make_models", make_smaller_models)
    use_engine(monkeypatch, is_forked=True)
    paths = [root, processes.REPOSITORY]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "found.json"
    words = ["--fix", "hybrids_without_graphs", "--quick", "--arms", "patched", "--jobs", "1", "--json", str(file)]
    assert main.main(["verify", *words]) == 0, capsys.readouterr().out
    found = {(row["case"], row["arm"]): row["counts"]["prefill"] for row in json.loads(file.read_text())["servers"]}
    for case in chosen:
        assert found[case.name, "patched"]["replayed"] == found[case.name, "reference"]["refused"] == 4


ON_CPU = {
    "log_level": "info",
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "max_total_tokens": 2048,
    "context_length": 512,
    "chunked_prefill_size": 64,
    "max_running_requests": 4,
}


def test_a_real_engine_gives_what_is_compared_and_prefills_together_what_is_asked_together(
    release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [release_root("0.5.12.post1"), processes.REPOSITORY]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    models.make("llama", tmp_path / "llama")
    usual = cases.named("llama_several_requests")
    assert usual
    script = cases.Script()
    script.ask("together", [3, 9, 5], 4)
    script.ask("chunked", [100], 2)
    script.ask_again("again", 0)
    flags = {"skip_tokenizer_init": True, "dtype": "bfloat16", "grammar_backend": "none", "disable_radix_cache": True}
    job = {
        "engine": {"model_path": str(tmp_path / "llama"), "sampling_backend": "pytorch", **flags, **ON_CPU},
        "logprobs": True,
        "calls": [dataclasses.asdict(call) for call in script.calls],
    }
    environ = {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_SELFCHECK": "strict", "SGLANG_BCG_CANARY": "1"}
    server = servers.Server("one", tmp_path / "one", job, environ)
    with servers.Runner([sys.executable, "-m", "tests.verify.cpu_server"], jobs=1) as runner:
        outcome = runner.start(server).result()
    assert outcome.finished, outcome.tail
    # against itself, with its own repetition
    requests = compare.compare(usual, script.calls, outcome, outcome)
    assert [request.outcome for request in requests] == [compare.EQUAL] * 7, requests
    first = outcome.answers[0][0]
    assert len(first["logprobs"]) == len(first["top"]) == 4 and len(first["top"][0]) > 1
    log = server.log.read_text()
    assert log.count("; self-check no graphs; more: bcg-fixes status; ") == 1
    assert log.count("#new-seq: 3, #new-token: 17") == 2 and "#new-token: 64" in log and "#new-token: 36" in log
