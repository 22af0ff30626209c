# SPDX-License-Identifier: Apache-2.0
"""Released SGLang's breakable prefill graphs against its own eager prefill, without and with the plugin, on a CPU."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from tests import processes
from tests.wheels import NEWEST, since

LAYERS = 3
# qwen3next has linear attention in layers 0 and 2; these releases break the graph at layer 1 only (sglang #25110)
LINEAR_ATTENTION_CAPTURED = ("0.5.11", "0.5.12.post1")
# release, model, and how SGLang ends: one for each way that a runner has of calling the layers
CANNOT_CALL_THE_LAYERS = (
    ("0.5.12.post1", "phi", "'ForwardBatch' object has no attribute 'flatten'"),
    ("0.5.13.post1", "qwen3next", "unexpected keyword argument 'input_embeds'"),
    ("0.5.14", "cohere", "takes 4 positional arguments but 5 were given"),
    ("0.5.18", "phi", "'ForwardBatch' object has no attribute 'flatten'"),
    ("0.5.23", "phi", "'ForwardBatch' object has no attribute 'flatten'"),
)
# spelt or ordered otherwise; 0.5.13 can call none of them
OTHER_MODELS = ("cohere", "persimmon", "phi3_small", "starcoder2")
CORRECT = ("0.5.15.post1", "0.5.17", "0.5.20", NEWEST)
# replays a batch of one request only
SINGLE_REQUEST = ("0.5.11",)
# the first releases that know its text by itself, and those that SGLang's own prefill graphs are right in
QWEN3_5 = since("0.5.19")
QWEN3_5_LAYERS = 4
Report = dict[str, Any]
Prefill = Callable[..., Report]


@pytest.fixture
def prefill(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Prefill:
    def run(release: str, plugins: str, *options: str) -> Report:
        report = tmp_path / "report.json"
        requests = "1" if release in SINGLE_REQUEST else "2"
        command = ["-m", "cpu_sglang.prefill", "--requests", requests, "--json", str(report), *options]
        process = processes.on_cpu(release_root(release), *command, environment={"SGLANG_PLUGINS": plugins})
        assert process.returncode == 0, process.stderr[-4000:]
        found: Report = json.loads(report.read_text())
        assert found["release"] == release
        return found

    return run


def assert_replayed_and_right(report: Report, layers: int) -> None:
    assert "error" not in report, report["error"]
    assert report["buckets"] == {size: {"segments": layers + 1, "breaks": layers} for size in ("8", "16")}
    assert len(report["batches"]) == 3
    for batch in report["batches"]:
        assert batch["segments_replayed"] == layers + 1
        assert batch["tokens"] == batch["tokens_eager"]
        assert batch["max_abs_logit_difference"] == 0.0


@pytest.mark.parametrize("release", LINEAR_ATTENTION_CAPTURED)
def test_without_the_plugin_old_releases_read_freed_memory(prefill: Prefill, release: str) -> None:
    report = prefill(release, "__none__", "--model", "qwen3next")
    assert {bucket["breaks"] for bucket in report["buckets"].values()} == {1}
    assert "illegal memory access" in report["error"]


@pytest.mark.parametrize("release", LINEAR_ATTENTION_CAPTURED)
def test_without_the_plugin_old_releases_answer_wrongly_where_no_memory_is_reused(
    prefill: Prefill, release: str
) -> None:
    report = prefill(release, "__none__", "--model", "qwen3next", "--freed-memory", "kept")
    assert "error" not in report
    assert {bucket["breaks"] for bucket in report["buckets"].values()} == {1}
    assert all(batch["segments_replayed"] == 2 for batch in report["batches"])
    assert any(batch["tokens"] != batch["tokens_eager"] for batch in report["batches"])
    assert min(batch["max_abs_logit_difference"] for batch in report["batches"]) > 1.0


@pytest.mark.parametrize(("release", "model", "error"), CANNOT_CALL_THE_LAYERS)
def test_without_the_plugin_these_models_do_not_start(prefill: Prefill, release: str, model: str, error: str) -> None:
    report = prefill(release, "__none__", "--model", model)
    assert error in report["error"] and not report["batches"]


@pytest.mark.parametrize(
    ("release", "model"),
    [*(case[:2] for case in CANNOT_CALL_THE_LAYERS), *(("0.5.13.post1", model) for model in OTHER_MODELS)],
)
def test_with_the_plugin_they_start_and_are_right(prefill: Prefill, release: str, model: str) -> None:
    report = prefill(release, "bcg_fixes", "--model", model)
    assert_replayed_and_right(report, LAYERS if model == "qwen3next" else 2)


@pytest.mark.parametrize("release", CORRECT)
def test_without_the_plugin_later_releases_are_right(prefill: Prefill, release: str) -> None:
    assert_replayed_and_right(prefill(release, "__none__", "--model", "qwen3next"), LAYERS)


@pytest.mark.parametrize("release", (*LINEAR_ATTENTION_CAPTURED, *CORRECT))
def test_with_the_plugin_every_release_that_starts_is_right(prefill: Prefill, release: str) -> None:
    assert_replayed_and_right(prefill(release, "bcg_fixes", "--model", "qwen3next"), LAYERS)


@pytest.mark.parametrize("plugins", ["__none__", "bcg_fixes"])
@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.13.post1", NEWEST])
def test_a_model_without_a_defect_stays_right(prefill: Prefill, release: str, plugins: str) -> None:
    assert_replayed_and_right(prefill(release, plugins, "--model", "llama"), layers=2)


@pytest.mark.parametrize("plugins", ["__none__", "bcg_fixes"])
@pytest.mark.parametrize("release", QWEN3_5)
def test_qwen3_5_keeps_every_graph_that_sglang_makes(prefill: Prefill, release: str, plugins: str) -> None:
    assert_replayed_and_right(prefill(release, plugins, "--model", "qwen3_5_text"), QWEN3_5_LAYERS)
