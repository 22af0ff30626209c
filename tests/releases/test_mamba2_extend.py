# SPDX-License-Identifier: Apache-2.0
"""Mamba2 captured with kernels of ours, against each release's own eager prefill, on the CPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, adapter
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL, is_measured
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.source import tree
from tests.releases import gdn_prefill, mamba2_prefill
from tests.releases.linear_extend_tests import (  # noqa: F401
    Found,
    Operation,
    Root,
    Run,
    assert_warm_is_cold,
    operation,
    test_it_stands_back_where_a_backend_answers_for_itself,
    test_the_source_is_known,
)
from tests.wheels import NEWEST

# later ones replay no batch that leaves most of a bucket empty
ONE = "0.5.12.post1"
# of each form of mixer, backend and break
RELEASES = (ONE, "0.5.15.post1", "0.5.20", NEWEST)
# those whose mixers write checkpoints in prefill
WITH_CHECKPOINTS = RELEASES[1:]
# of a model: its layers of attention, and all that break
BREAKS = {"nemotron_h": (1, 3), "falcon_h1": (2, 4)}
MODELS = tuple(BREAKS)
# of states and windows of the first layer, and of what is behind it
LIMITS = {
    **{"first conv": 0.0, "first state": 0.002, "first kept conv": 0.0, "first kept state": 0.002},
    **{"logits": 0.02, "conv": 0.01, "state": 0.01, "kept conv": 0.01, "kept state": 0.01},
}
OPERATION = Operation(KERNEL, "tests.releases.mamba2_prefill", BREAKS, LIMITS)


@pytest.fixture
def run(release_root: Root) -> Run:
    def run(release: str, *arguments: str, **others: str) -> Found:
        return OPERATION.run(release_root(release), *arguments, **others)

    return run


@pytest.mark.parametrize("model", MODELS)
def test_replays_are_right_and_break_at_attention_only(run: Run, model: str) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "right", model), model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", RELEASES[1:])
def test_so_they_are_on_other_releases(run: Run, release: str, model: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "brief", model), model)


@pytest.mark.parametrize("model", MODELS)
def test_the_triton_kernels_are_right_too(run: Run, model: str) -> None:
    OPERATION.assert_captured_and_right(run(NEWEST, "short", model, "triton"), model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_the_cuda_source_is_right_with_what_a_layer_gives_it(run: Run, release: str, model: str) -> None:
    report = run(release, "in_cuda", model, "cuda")
    OPERATION.assert_captured_and_right(report, model)
    assert report["launched"]["advance"] > 0


@pytest.mark.parametrize("model", MODELS)
def test_by_default_they_take_the_families_that_were_measured(run: Run, model: str) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "short", model, "auto"), model)


@pytest.mark.parametrize("model", MODELS)
def test_a_replay_has_the_bits_of_the_same_kernels_without_a_graph(run: Run, model: str) -> None:
    report = run(NEWEST, "own_eager", model, "triton")
    for script in report["scripts"]:
        OPERATION.assert_same(script)
        assert set(script["replays"]) == {0}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", WITH_CHECKPOINTS)
def test_checkpoints_for_the_prefix_cache_are_written_from_inside(run: Run, release: str, model: str) -> None:
    OPERATION.assert_checkpoints(run(release, "checkpoints", model), model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", WITH_CHECKPOINTS)
def test_a_warm_prefix_cache_answers_as_a_cold_one(run: Run, release: str, model: str) -> None:
    assert_warm_is_cold(run(release, "warm", model))


@pytest.mark.parametrize("model", MODELS)
def test_batches_that_captured_kernels_cannot_serve_run_eagerly(run: Run, model: str) -> None:
    OPERATION.assert_refused_run_eagerly(run(NEWEST, "refused", model), model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_a_layer_that_is_not_served_keeps_the_break(run: Run, release: str, model: str) -> None:
    report = run(release, "configured", model)
    OPERATION.assert_breaks(report, BREAKS[model][1], {"no kernel for projections in torch.float32": 2})
    OPERATION.assert_same(report["script"])


# the mixer is told by an argument, and by what its caller sets
@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.17"])
def test_few_rows_may_be_reduced_together_with_the_next_layers(run: Run, release: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "reduced_later", "nemotron_h"), "nemotron_h")


# from the second on SGLang asks about ranks without its arguments
@pytest.mark.parametrize("release", ["0.5.17", "0.5.21"])
def test_graphs_are_replayed_where_batches_count_the_tokens_of_ranks(run: Run, release: str) -> None:
    # alone it would count them with itself
    report = run(release, "counted", "falcon_h1", SGLANG_SCHEDULER_SKIP_ALL_GATHER="1")
    OPERATION.assert_breaks(report, BREAKS["falcon_h1"][1], {"batches with counts of every rank's tokens": 1})
    for script in report["scripts"]:
        OPERATION.assert_same(script)
        assert script["replays"] == [BREAKS["falcon_h1"][1] + 1]


def test_switched_off_the_break_stays(run: Run) -> None:
    OPERATION.assert_breaks(run(NEWEST, "configured", "nemotron_h", "off"), BREAKS["nemotron_h"][1])


@pytest.mark.parametrize("model", MODELS)
def test_mutants_are_noticed(run: Run, model: str) -> None:
    of_model = mamba2_prefill.OF_FALCON if model == "falcon_h1" else {}
    OPERATION.assert_noticed(run(ONE, "mutants", model), {**mamba2_prefill.MUTANTS, **of_model})


# what is decided without a model


def mixer(**changed: Any) -> Any:
    plain = {
        "tp_size": 1,
        "num_heads": 4,
        "n_groups": 2,
        "head_dim": 16,
        "ssm_state_size": 16,
        "activation": "silu",
        "conv1d": types.SimpleNamespace(weight=torch.empty(128, 1, 4)),
        **dict.fromkeys(("A", "D", "dt_bias"), torch.empty(4)),
    }
    return types.SimpleNamespace(**{**plain, **changed})


def cache(**changed: Any) -> Any:
    plain = {"conv": [torch.empty(3, 128, 3, dtype=torch.float16)], "temporal": torch.empty(3, 4, 16, 16)}
    return types.SimpleNamespace(**{**plain, **changed})


HIDDEN = torch.empty(8, 64, dtype=torch.float16)


def test_a_plain_mixer_is_taken() -> None:
    assert adapter.why_not(mixer(), HIDDEN, cache()) is None


def test_one_of_several_ranks_has_its_part() -> None:
    assert adapter.shape_of(mixer(tp_size=2)) == Shape(2, 1, 16, 16, 4)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((mixer(), HIDDEN[None], cache()), "hidden states that are not a two-dimensional tensor"),
        ((mixer(), HIDDEN, cache(temporal=torch.empty(6, 4, 16, 16)[::2])), "strided state pools"),
        ((mixer(A=torch.empty(8)[::2]), HIDDEN, cache()), "weights that are not contiguous"),
        ((mixer(activation="gelu"), HIDDEN, cache()), "no kernel for the activation 'gelu'"),
        ((mixer(head_dim=20), HIDDEN, cache()), "no kernel for heads of 20"),
    ],
)
def test_mixers_that_are_refused(given: tuple[Any, ...], reason: str) -> None:
    assert adapter.why_not(*given) == reason


@pytest.mark.parametrize(
    ("release", "architecture", "by_default"),
    [
        ("0.5.17", "NemotronHForCausalLM", True),
        ("0.5.17", "NemotronH_Nano_VL_V2", True),
        ("0.5.17", "FalconH1ForCausalLM", True),
        ("0.5.17", "GraniteMoeHybridForCausalLM", False),
        (NEWEST, "NemotronHForCausalLM", False),
        (NEWEST, "FalconH1ForCausalLM", True),
        (NEWEST, "GraniteMoeHybridForCausalLM", True),
    ],
)
@pytest.mark.parametrize("named", [False, True], ids=["auto", "by name"])
def test_by_default_another_family_keeps_its_breaks(
    release_root: Root, monkeypatch: pytest.MonkeyPatch, release: str, architecture: str, by_default: bool, named: bool
) -> None:
    left: list[str] = []
    found = plan.ask(KERNEL, tree.Source(tree.Folder(release_root(release))))
    selected = types.SimpleNamespace(
        required=named, fall_back=left.append, forms={item.where: item.form for item in found.evidence}
    )

    def asked(model_runner: Any) -> None:
        raise serving.FallBack("it is asked what else refuses")

    monkeypatch.setattr(active, "selected", lambda op: selected)
    monkeypatch.setattr(serving, "makes_breakable_graphs", lambda runner: True)
    monkeypatch.setattr(serving, "refuse_configuration", lambda *given: None)
    monkeypatch.setattr(serving, "backend_of", asked)
    config = types.SimpleNamespace(hf_config=types.SimpleNamespace(architectures=[architecture]))
    runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model_config=config))
    assert adapter.OPERATION.begin(runner) is None
    unmeasured = f"{architecture}, which was not measured on this release; {KERNEL.flag}=triton takes it"
    assert left == ["it is asked what else refuses" if named or by_default else unmeasured]


@pytest.mark.parametrize("named", [False, True], ids=["auto", "by name"])
def test_states_in_bfloat16_keep_the_break_unless_an_implementation_is_named(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    runner = adapter.Served.__new__(adapter.Served)
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=named))
    monkeypatch.setattr(adapter, "why_not", lambda *given: "the layer is asked")
    for kept, measured in ((torch.float32, True), (torch.bfloat16, False)):
        state = types.SimpleNamespace(temporal=torch.empty(0, dtype=kept))
        monkeypatch.setattr(runner, "cache", lambda layer_id, state=state: state)
        unmeasured = f"states in {kept}, which were not measured; {KERNEL.flag}=triton takes bfloat16"
        assert runner.refusal_of_mixer(None, None, 0) == ("the layer is asked" if named or measured else unmeasured)


def test_a_source_that_no_longer_says_what_batches_have_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.common", types.ModuleType("common"))
    with pytest.raises(serving.FallBack, match="does not say whether batches have counts of every rank's tokens"):
        serving.counts_ranks(types.SimpleNamespace())


def test_a_model_without_such_layers_is_not_said_to_be_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def asked(model_runner: Any, backend: str) -> None:
        raise serving.FallBack("the backend is another")

    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=False, fall_back=left.append))
    monkeypatch.setattr(serving, "makes_breakable_graphs", lambda runner: True)
    monkeypatch.setattr(serving, "refuse_configuration", asked)
    assert adapter.OPERATION.begin(types.SimpleNamespace(model_runner=types.SimpleNamespace())) is None
    assert left == ["the backend is another"]


def test_outside_a_capture_nothing_is_taken() -> None:
    assert adapter.is_taken(mixer(), HIDDEN, 0) is False


def served() -> adapter.Served:
    found = adapter.Served.__new__(adapter.Served)
    found.cache = lambda layer_id: cache()  # type: ignore[method-assign]
    return found


def test_a_projection_of_another_kind_is_an_error() -> None:
    wrong = mixer(in_proj=lambda hidden: (torch.empty(8, 196), None))
    with pytest.raises(RuntimeError, match=f"projects torch.float16 to torch.float32 .* Set {KERNEL.flag}=off"):
        served().mix(wrong, HIDDEN, 0)


DRIFTED = {
    "the mixer has another step": (
        *(NEWEST, "sglang/srt/layers/attention/mamba/mamba.py"),
        *("hidden_states = self.norm(preallocated_ssm_out, gate)", "hidden_states = preallocated_ssm_out"),
    ),
    "the break runs something else": (
        *(NEWEST, "sglang/srt/models/nemotron_h.py"),
        *("ret = mamba_layer._forward_mamba(hidden_states, forward_batch)", "ret = mamba_layer(hidden_states)"),
    ),
    "checkpoints are written elsewhere": (
        *(NEWEST, "sglang/srt/layers/attention/hybrid_linear_attn_backend.py"),
        *("    def _track_mamba_state_extend(", "    def _keep_mamba_state_extend("),
    ),
    "the metadata is another": (
        *("0.5.15.post1", "sglang/srt/layers/attention/mamba/mamba2_metadata.py"),
        *("has_initial_states = context_lens_tensor > 0", "has_initial_states = context_lens_tensor > 1"),
    ),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_drifted_source_is_unknown(release_root: Root, drift: str) -> None:
    release, *change = DRIFTED[drift]
    source = OPERATION.assert_unknown(release_root(release), *change)
    # and no launch of it is called faster
    assert not is_measured(Launch(source, {"architectures": ["GraniteMoeHybridForCausalLM"]}, {}))


@pytest.mark.parametrize("asked", [None, "triton", "reference"])
@pytest.mark.parametrize("release", [ONE, "0.5.20", NEWEST])
def test_it_runs_by_name_and_by_default_where_it_was_measured(
    release_root: Root, release: str, asked: str | None
) -> None:
    OPERATION.assert_chosen(release_root(release), asked, None if release == "0.5.20" else "triton")


def test_the_scripts_have_what_is_to_be_tried() -> None:
    # a request that goes on behind a prefix, one that begins late, and several beside each other
    assert any(len(request) > 1 for script in gdn_prefill.CHUNKED for request in script)
    assert any(request[0] == 0 for script in gdn_prefill.CHUNKED for request in script)


@pytest.mark.parametrize("model", MODELS)
def test_the_self_check_calls_it_right(release_root: Root, model: str) -> None:
    OPERATION.assert_checked(release_root(NEWEST), model, model)
