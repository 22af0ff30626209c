# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state of their own in real releases: broken once, and refused where no break is known."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import hybrids_without_graphs, ssm_mixer_captured, unbroken_mixer_captured
from sglang_bcg_fixes.planning.registry import declared_in
from tests import processes
from tests.wheels import NEWEST

Found = dict[str, Any]
Run = Callable[..., Found]
OFF = {declared_in(ssm_mixer_captured).flag: "off"}
EVERYTHING_OFF = {**OFF, declared_in(unbroken_mixer_captured).flag: "off"}
LINEAR_OFF = {**OFF, "SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED": "off"}
# one for each way that a runner has of capturing a model, of reaching the batch, and of making a break
RELEASES = ("0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.15.post1", "0.5.17", "0.5.19", NEWEST)
FALCON_LAYERS, NEMOTRON_LAYERS = 2, 3
ARCHITECTURES = (
    *("BailingMoeV2_5ForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM"),
    *("Lfm2ForCausalLM", "LlamaForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"),
    *("DeepseekV32ForCausalLM", "DeepseekV32ForCausalLM pooled"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
DELTA_NETS = ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
FALCON = [f"model.layers.{layer} (FalconH1HybridAttentionDecoderLayer)" for layer in range(4)]
# SGLang itself makes no graphs for these two, and hybrids_without_graphs does
GRANITE = [f"model.layers.{layer} (GraniteMoeHybridMambaDecoderLayer)" for layer in (0, 2)]
# its indexer breaks from 0.5.15 on, and the pooled one has since there is one
DEEPSEEK = [f"model.layers.{layer}.self_attn.indexer (Indexer)" for layer in range(4)]
SPARSE = {"DeepseekV32ForCausalLM": DEEPSEEK, "DeepseekV32ForCausalLM pooled": DEEPSEEK}
LFM2 = [f"model.layers.{layer}.conv (Lfm2ShortConv)" for layer in (0, 2)]


@pytest.fixture
def run(release_root: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> Run:
    def run(release: str, module: str, *options: str, plugins: str = "bcg_fixes", **environment: str) -> Found:
        out = tmp_path / "report.json"
        options = (*options, "--json", str(out)) if module == "cpu_sglang.prefill" else (str(out), *options)
        process = processes.on_cpu(
            release_root(release), *("-m", module, *options), environment={"SGLANG_PLUGINS": plugins, **environment}
        )
        assert process.returncode == 0, process.stderr[-4000:]
        found: Found = json.loads(out.read_text())
        return found

    return run


def prefill(run: Run, release: str, model: str, *options: str, **environment: str) -> Found:
    return run(release, "cpu_sglang.prefill", "--model", model, *options, **environment)


def assert_broken_and_right(report: Found, breaks: int) -> None:
    assert "error" not in report, report["error"]
    assert report["buckets"] == {size: {"segments": breaks + 1, "breaks": breaks} for size in ("8", "16")}
    for batch in report["batches"]:
        assert batch["segments_replayed"] == breaks + 1
        assert batch["max_abs_logit_difference"] == 0.0


@pytest.mark.parametrize("release", ["0.5.15.post1", NEWEST])
def test_without_the_fix_falcon_reads_freed_memory(run: Run, release: str) -> None:
    report = prefill(run, release, "falcon_h1", plugins="__none__")
    assert {bucket["breaks"] for bucket in report["buckets"].values()} == {FALCON_LAYERS}
    assert "illegal memory access" in report["error"]


def test_both_fixes_off_leave_sglangs_wrong_answers(run: Run) -> None:
    report = prefill(run, "0.5.12.post1", "falcon_h1", "--freed-memory", "kept", **EVERYTHING_OFF)
    assert "error" not in report
    assert min(batch["segments_replayed"] for batch in report["batches"]) == FALCON_LAYERS + 1
    assert min(batch["max_abs_logit_difference"] for batch in report["batches"]) > 1.0


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fix_falcon_breaks_at_attention_and_mixer(run: Run, release: str) -> None:
    assert_broken_and_right(prefill(run, release, "falcon_h1"), breaks=2 * FALCON_LAYERS)


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.17"])
def test_a_mixer_inside_a_break_is_not_broken_again(run: Run, release: str) -> None:
    assert_broken_and_right(prefill(run, release, "nemotron_h"), breaks=NEMOTRON_LAYERS)


@pytest.mark.parametrize("release", ["0.5.11", "0.5.13.post1", "0.5.19"])
def test_a_mixer_without_a_break_is_refused_and_served_eagerly(run: Run, release: str) -> None:
    report = run(release, "tests.releases.mixers", **OFF)
    assert "captured nothing" in report["outcome"]
    assert report["replays"] == 0 and report["difference"] == 0.0
    (warning,) = report["warnings"]
    assert "model.layers.0 (FalconH1HybridAttentionDecoderLayer) (and 1 more)" in warning
    assert "SGLANG_BCG_FIX_UNBROKEN_MIXER_CAPTURED=off" in warning


@pytest.mark.parametrize(
    ("release", "environment", "refused"),
    [
        ("0.5.11", {}, {"Lfm2ForCausalLM": LFM2, **SPARSE}),
        ("0.5.14", {}, {"Lfm2ForCausalLM": LFM2, **SPARSE}),
        ("0.5.17", {}, {"Lfm2ForCausalLM": LFM2}),
        (NEWEST, {}, {"Lfm2ForCausalLM": LFM2}),
        # the fix has its break round LFM2's convolutions
        (NEWEST, {declared_in(hybrids_without_graphs).flag: "on"}, {}),
        (NEWEST, OFF, {"FalconH1ForCausalLM": FALCON, "GraniteMoeHybridForCausalLM": GRANITE, "Lfm2ForCausalLM": LFM2}),
        (
            "0.5.12.post1",
            LINEAR_OFF,
            {
                "FalconH1ForCausalLM": FALCON,
                "GraniteMoeHybridForCausalLM": GRANITE,
                "KimiLinearForCausalLM": [f"model.layers.{i}.self_attn.attn (RadixLinearAttention)" for i in range(3)],
                "Lfm2ForCausalLM": LFM2,
                **SPARSE,
                **{
                    key: [f"model.layers.{i}.linear_attn.attn (RadixLinearAttention)" for i in (0, 2)]
                    for key in DELTA_NETS
                },
            },
        ),
    ],
)
def test_what_has_no_break_is_found_in_every_model(
    run: Run, release: str, environment: dict[str, str], refused: dict[str, list[str]]
) -> None:
    found = run(release, "tests.releases.mixers", *ARCHITECTURES, **environment)
    assert len(found) == len(ARCHITECTURES)
    assert {name: mixers for name, mixers in found.items() if mixers} == refused
