# SPDX-License-Identifier: Apache-2.0
"""LFM2's short convolutions captured, against each release's own eager prefill, on the CPU."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import pytest
import torch

from cpu_sglang import architectures
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.short_conv_extend import Shape, adapter
from sglang_bcg_fixes.kernels.short_conv_extend.declaration import BACKEND, KERNEL, OLD_BACKEND
from sglang_bcg_fixes.planning import registry
from tests import processes
from tests.releases import gdn_prefill, short_conv_prefill
from tests.releases.linear_extend_tests import (  # noqa: F401
    Found,
    Operation,
    Root,
    Run,
    assert_warm_is_cold,
    operation,
    pytest_generate_tests,
    test_a_drifted_source_is_unknown,
    test_it_stands_back_where_a_backend_answers_for_itself,
    test_the_source_is_known,
)
from tests.scenarios.admitted_hybrids import LAYERS, overrides_of
from tests.wheels import NEWEST

ADMITTING = registry.declared_in(hybrids_without_graphs)

# later ones replay no batch that leaves most of a bucket empty
ONE = "0.5.12.post1"
# of each form of layer, backend and runner
RELEASES = (ONE, "0.5.15.post1", "0.5.20", NEWEST)
DENSE, EXPERTS = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
# by architecture: its layers of attention, and all that break
BREAKS = {name: (LAYERS[name].count("full_attention"), len(LAYERS[name])) for name in (DENSE, EXPERTS)}
# SGLang's convolution multiplies in half precision on the interpreter, ours in fp32
LIMITS = {"first conv": 0.0, "conv": 0.005, "logits": 0.005}
OPERATION = Operation(
    KERNEL,
    "tests.releases.short_conv_prefill",
    BREAKS,
    LIMITS,
    # later releases replay nothing that leaves most of a bucket empty
    replays_every_step=False,
    environment={ADMITTING.flag: "on"},
)


@pytest.fixture
def run(release_root: Root) -> Run:
    def run(release: str, *arguments: str, **others: str) -> Found:
        return OPERATION.run(release_root(release), *arguments, **others)

    return run


@pytest.mark.parametrize("model", BREAKS)
def test_replays_are_right_and_break_at_attention_only(run: Run, model: str) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "right", model), model)


@pytest.mark.parametrize(
    ("release", "model"),
    [
        # whose eager convolutions another fix tells of prefixes
        ("0.5.11", DENSE),
        ("0.5.11", EXPERTS),
        (ONE, EXPERTS),
        ("0.5.15.post1", DENSE),
        ("0.5.20", EXPERTS),
        (NEWEST, DENSE),
        (NEWEST, EXPERTS),
    ],
)
def test_so_does_the_triton_implementation_on_other_releases(run: Run, release: str, model: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "brief", model, "triton"), model)


def test_prompts_mixed_with_decode_are_right_too(run: Run) -> None:
    OPERATION.assert_captured_and_right(run("0.5.15.post1", "mixed", DENSE, "triton"), DENSE)


def test_padding_that_is_nan_reaches_no_token(run: Run) -> None:
    report = run("0.5.20", "poisoned", EXPERTS, "triton")
    assert report["padded"] > 0
    OPERATION.assert_captured_and_right(report, EXPERTS)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("model", BREAKS)
def test_a_replay_has_the_bits_of_the_same_implementation_without_a_graph(
    run: Run, model: str, implementation: str
) -> None:
    report = run("0.5.20" if model == DENSE else NEWEST, "own_eager", model, implementation)
    for script in report["scripts"]:
        OPERATION.assert_same(script)
        assert set(script["replays"]) == {0}


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_behind_a_prefix_an_answer_is_that_of_the_whole_prompt(run: Run, release: str) -> None:
    found = run(release, "warm", DENSE, "triton")
    assert_warm_is_cold(found)
    assert found["replays"] == 3 * (BREAKS[DENSE][0] + 1) and found["conv"] == 0.0, found


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_a_servers_prefix_cache_answers_as_without_graphs(run: Run, release: str) -> None:
    found = run(release, "cached", DENSE, module="tests.scenarios.admitted_hybrids")
    assert found["breaks"] == [BREAKS[DENSE][0]]
    assert found["replays"] >= 3 * (found["breaks"][0] + 1)
    assert max(found["hits"]) >= 64 and found["same hits"] and found["off"] <= LIMITS["logits"], found


def test_two_tensor_parallel_ranks_are_right(run: Run) -> None:
    found = run(NEWEST, "two_ranks", DENSE)
    for rank in found["ranks"]:
        assert set(rank["breaks"].values()) == {BREAKS[DENSE][0]}
        for script in rank["scripts"]:
            OPERATION.assert_right(script, DENSE)


def test_batches_that_captured_kernels_cannot_serve_run_eagerly(run: Run) -> None:
    OPERATION.assert_refused_run_eagerly(run("0.5.15.post1", "refused", DENSE), DENSE)


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_a_layer_that_is_not_served_keeps_the_break(run: Run, release: str) -> None:
    report = run(release, "configured", DENSE, SGLANG_MAMBA_CONV_DTYPE="float32")
    reason = "no kernel for windows in torch.float32 for hidden states in torch.float16"
    OPERATION.assert_breaks(report, BREAKS[DENSE][1], {reason: LAYERS[DENSE].count("conv")})
    OPERATION.assert_same(report["script"])


def test_with_checkpoints_every_layer_keeps_the_break(run: Run) -> None:
    report = run(NEWEST, "refused_checkpoints", DENSE)
    left = {"checkpoints for the prefix cache, which such layers do not write": 1}
    OPERATION.assert_breaks(report, BREAKS[DENSE][1], left)


def test_switched_off_the_break_stays(run: Run) -> None:
    report = run(NEWEST, "configured", DENSE, "off")
    OPERATION.assert_breaks(report, BREAKS[DENSE][1])
    OPERATION.assert_same(report["script"])


def test_without_the_fix_there_is_nothing_to_capture(run: Run) -> None:
    found = run(NEWEST, "admission", DENSE, module="tests.scenarios.admitted_hybrids", **{ADMITTING.flag: "off"})
    assert "captured nothing" in found["captured"]


def test_mutants_are_noticed(run: Run) -> None:
    OPERATION.assert_noticed(run(ONE, "mutants", DENSE), short_conv_prefill.MUTANTS)


@pytest.mark.parametrize("release", ["0.5.11", NEWEST])
def test_the_triton_implementation_is_no_further_off_than_sglangs(release_root: Root, release: str) -> None:
    found, _ = processes.beside(release_root(release), "-m", "tests.scenarios.short_conv_accuracy")
    ours, sglangs = found["ours"], found["SGLang's"]
    assert 0 < ours["output"] <= 1.1 * sglangs["output"], found
    assert ours["conv"] == sglangs["conv"] == 0.0


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_the_self_check_calls_it_right(release_root: Root, tmp_path: pathlib.Path, release: str) -> None:
    config = {**architectures.CONFIGURATIONS[DENSE].config, "architectures": [DENSE]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **overrides_of(DENSE)}))
    OPERATION.assert_checked(release_root(release), str(tmp_path), DENSE)


def test_the_scripts_have_what_is_to_be_tried() -> None:
    width = 3
    pieces = [length for request in short_conv_prefill.SHORT_PIECES for length in request]
    assert any(0 < length < width - 1 for length in pieces)
    # a request that goes on behind a prefix, one that begins late, and several beside each other
    assert any(len(request) > 1 for script in gdn_prefill.CHUNKED for request in script)
    assert any(request[0] == 0 for script in gdn_prefill.CHUNKED for request in script)


# what is decided without a model


def layer(**changed: Any) -> Any:
    return types.SimpleNamespace(**{"layer_idx": 0, "conv_weight": torch.empty(64, 3), **changed})


def cache(**changed: Any) -> Any:
    return types.SimpleNamespace(**{"conv": [torch.empty(3, 64, 2, dtype=torch.float16)], **changed})


HIDDEN = torch.empty(8, 128, dtype=torch.float16)


def test_a_plain_layer_is_taken() -> None:
    assert adapter.why_not(layer(), HIDDEN, cache()) is None
    assert adapter.shape_of(layer()) == Shape(64, 3)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((layer(), HIDDEN[None], cache()), "hidden states that are not a two-dimensional tensor"),
        ((layer(), None, cache()), "hidden states that are not a two-dimensional tensor"),
        ((layer(conv_weight=torch.empty(3, 64).T), HIDDEN, cache()), "weights that are not contiguous"),
        ((layer(), HIDDEN.float(), cache()), "no kernel for hidden states in torch.float32"),
        (
            (layer(), HIDDEN, cache(conv=[torch.empty(3, 64, 2, dtype=torch.bfloat16)])),
            "no kernel for windows in torch.bfloat16 for hidden states in torch.float16",
        ),
        ((layer(conv_weight=torch.empty(40, 3)), HIDDEN, cache()), "no kernel for 40 channels"),
    ],
)
def test_layers_that_are_refused(given: tuple[Any, ...], reason: str) -> None:
    assert adapter.why_not(*given) == reason


def test_outside_a_capture_nothing_is_taken() -> None:
    assert adapter.is_taken(layer(), HIDDEN, None) is False


def test_a_projection_of_another_kind_is_an_error() -> None:
    served = adapter.Served.__new__(adapter.Served)
    wrong = layer(in_proj=lambda hidden: (torch.empty(8, 192), None))
    with pytest.raises(RuntimeError, match=f"projects torch.float16 to torch.float32. Set {KERNEL.flag}=off"):
        served.mix(wrong, HIDDEN)


@pytest.mark.parametrize(("release", "backend"), [("0.5.14", OLD_BACKEND), ("0.5.15", BACKEND), (NEWEST, BACKEND)])
def test_the_step_is_prepared_by_the_backend_of_the_release(release_root: Root, release: str, backend: str) -> None:
    assert backend.partition(":")[0] in OPERATION.chosen(release_root(release), "reference").places


def test_it_stands_back_where_mamba2s_backend_answers_for_it(release_root: Root) -> None:
    OPERATION.assert_stands_back(release_root("0.5.14"), OLD_BACKEND)


LFM2, LFM2_MOE = "sglang/srt/models/lfm2.py", "sglang/srt/models/lfm2_moe.py"
DRIFTED = {
    "the layer does something new": (
        *(NEWEST, LFM2),
        *("output, _ = self.out_proj(C_gate * conv_out)", "output = self.out_proj(C_gate * conv_out)[0]"),
    ),
    "the layer with experts activates": (ONE, LFM2_MOE, "activation=None", 'activation="silu"'),
    "windows are found elsewhere": (
        *(NEWEST, "sglang/srt/layers/attention/linear/short_conv_backend.py"),
        *("idx = md.mamba_cache_indices if", "idx = md.short_conv_indices if"),
    ),
    "prefixes are others": (
        *("0.5.15.post1", "sglang/srt/layers/attention/linear/short_conv_backend.py"),
        *("forward_batch.extend_prefix_lens > 0", "forward_batch.extend_prefix_lens > 1"),
    ),
    "the metadata is another": (
        *(ONE, "sglang/srt/layers/attention/mamba/mamba2_metadata.py"),
        *("has_initial_states = context_lens_tensor > 0", "has_initial_states = context_lens_tensor > 1"),
    ),
}


@pytest.mark.parametrize("asked", [None, "reference", "triton"])
@pytest.mark.parametrize("release", ["0.5.20", NEWEST])
def test_it_runs_by_name_and_by_default_where_it_was_measured(
    release_root: Root, release: str, asked: str | None
) -> None:
    OPERATION.assert_chosen(release_root(release), asked, "triton" if release == NEWEST else None)
