# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention captured with kernels of ours, against each release's own eager prefill, on the CPU."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.kda_extend import Shape, adapter
from sglang_bcg_fixes.kernels.kda_extend.declaration import BACKEND, KERNEL
from sglang_bcg_fixes.kernels.linear_extend import places, serving
from sglang_bcg_fixes.kernels.linear_extend.serving import FallBack
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.source import tree
from tests import processes, wheels
from tests.kernels import accuracy
from tests.releases import kda_prefill
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
)

# where SGLang breaks at such a layer, and computes it right
SERVED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21")
ONE, ANOTHER = "0.5.20", "0.5.21"
# of each form of backend and runner; the first replays no batch behind a prefix with latent attention
FIRST_SERVED = "0.5.17"
RELEASES = (FIRST_SERVED, ONE, ANOTHER)
KIMI = "kimi_linear"
BREAKS = (1, 3)
# of states and windows of the first layer, and of what is behind it
LIMITS = {
    **{"first conv": 0.0, "first state": 0.002, "first kept conv": 0.0, "first kept state": 0.002},
    **{"logits": 0.02, "conv": 0.01, "state": 0.01, "kept conv": 0.01, "kept state": 0.01},
}
# of logits alone: latent attention is replayed in its absorbed form, and runs eagerly in the expanded one
OTHER_FORM = 0.001
OPERATION = Operation(
    KERNEL,
    "tests.releases.kda_prefill",
    {KIMI: BREAKS},
    LIMITS,
    noticed=0.1,
    replays_every_step=False,
    last_release=SERVED[-1],
)

# gates of which SGLang's kernels lose none
KEPT = ("near 0, None", "gentle, None", "mixed, -5.0")
# of each form of those kernels
WITH_RIGHT_DECAYS = (FIRST_SERVED, ONE)
# how far SGLang's are off where they lose some
LOST = 0.02


@pytest.fixture
def run(release_root: Root) -> Run:
    def run(release: str, *arguments: str, **others: str) -> Found:
        return OPERATION.run(release_root(release), *arguments, **others)

    return run


def test_replays_are_right_and_break_at_attention_only(run: Run) -> None:
    report = run(ONE, "right", KIMI)
    OPERATION.assert_captured_and_right(report, KIMI)
    # behind a prefix, too
    assert any(script["replays"][1:] == [BREAKS[0] + 1] * 2 for script in report["scripts"])


@pytest.mark.parametrize("release", [release for release in RELEASES if release != ONE])
def test_so_they_are_on_other_releases(run: Run, release: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "brief", KIMI), KIMI)


@pytest.mark.parametrize("release", [FIRST_SERVED, ANOTHER])
def test_the_triton_kernels_are_right_too(run: Run, release: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "short", KIMI, "triton"), KIMI)


@pytest.mark.parametrize("release", RELEASES)
def test_a_replay_has_the_bits_of_the_same_kernels_without_a_graph(run: Run, release: str) -> None:
    report = run(release, "own_eager", KIMI, "triton")
    assert set(report["breaks"].values()) == {BREAKS[0]}
    # only the first script has no prefix
    for script in report["scripts"][: 1 if release == FIRST_SERVED else None]:
        OPERATION.assert_same(script, OTHER_FORM)
        assert set(script["replays"]) == {0}


@pytest.mark.parametrize("release", RELEASES)
def test_checkpoints_for_the_prefix_cache_are_written_from_inside(run: Run, release: str) -> None:
    OPERATION.assert_checkpoints(run(release, "checkpoints", KIMI), KIMI)


@pytest.mark.parametrize("release", [ONE, ANOTHER])
def test_a_warm_prefix_cache_answers_as_a_cold_one(run: Run, release: str) -> None:
    assert_warm_is_cold(run(release, "warm", KIMI))


def test_batches_that_captured_kernels_cannot_serve_run_eagerly(run: Run) -> None:
    OPERATION.assert_refused_run_eagerly(run(ONE, "refused", KIMI), KIMI)


@pytest.mark.parametrize("release", [FIRST_SERVED, ANOTHER])
def test_a_layer_that_is_not_served_keeps_the_break(run: Run, release: str) -> None:
    report = run(release, "configured", KIMI)
    OPERATION.assert_breaks(report, BREAKS[1], {"deterministic inference": 1})
    OPERATION.assert_same(report["script"], OTHER_FORM)


def test_switched_off_the_break_stays(run: Run) -> None:
    OPERATION.assert_breaks(run(ONE, "configured", KIMI, "off"), BREAKS[1])


def test_the_self_check_calls_it_right(run: Run) -> None:
    report = run(ONE, "checked", KIMI)
    assert report["selfcheck"]["verdict"] == "right" and report["left"] == {}, report
    assert report["selfcheck"]["reason"].startswith("7 of 7 compared"), report


def test_mutants_are_noticed(run: Run) -> None:
    OPERATION.assert_noticed(run(ONE, "mutants", KIMI), kda_prefill.MUTANTS)


# its error


def errors(root: pathlib.Path) -> Found:
    found: Found
    found, _ = processes.beside(root, "-m", "tests.scenarios.kda_accuracy", timeout=300)
    for case in found.values():
        assert case["ours"]["conv"] == case["SGLang's"]["conv"] == 0
        assert all(0 < case["ours"][name] <= accuracy.TOLERANCE for name in ("output", "state")), found
    return found


@pytest.mark.parametrize("release", WITH_RIGHT_DECAYS)
def test_the_triton_kernels_are_no_further_off_than_sglangs(release_root: Root, release: str) -> None:
    found = errors(release_root(release))
    for case in KEPT:
        ours, sglangs = found[case]["ours"], found[case]["SGLang's"]
        assert all(ours[name] <= 1.1 * sglangs[name] for name in ("output", "state")), found
    # within 16 tokens of a short batch they bound the sum of gates
    assert found["mixed, None"]["SGLang's"]["output"] > LOST


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.16"])
def test_before_0_5_17_sglangs_kernels_take_powers_of_two_for_those_of_e(release_root: Root, release: str) -> None:
    found = errors(release_root(release))
    assert found["near 0, None"]["SGLang's"]["output"] < accuracy.TOLERANCE
    assert all(found[case]["SGLang's"]["output"] > LOST for case in found if case != "near 0, None"), found


# what is decided without a model


def layer(**changed: Any) -> Any:
    plain = {
        "layer_id": 0,
        **dict.fromkeys(("num_q_heads", "num_k_heads", "num_v_heads"), 2),
        **dict.fromkeys(("head_k_dim", "head_v_dim"), 16),
        "conv_weights": torch.empty(96, 4),
        "bias": None,
        "activation": "silu",
        "A_log": torch.empty(1, 1, 2, 1),
        "dt_bias": torch.empty(32),
        "lower_bound": None,
    }
    return types.SimpleNamespace(**{**plain, **changed})


def cache(**changed: Any) -> Any:
    plain = {"conv": [torch.empty(3, 3, 96, dtype=torch.float16)], "temporal": torch.empty(3, 2, 16, 16)}
    return types.SimpleNamespace(**{**plain, **changed})


HALF = torch.float16
MIXED, GATES, BETAS = torch.empty(8, 96, dtype=HALF), torch.empty(1, 8, 2, 16, dtype=HALF), torch.empty(1, 8, 2)


def test_a_plain_layer_is_taken() -> None:
    assert adapter.why_not(layer(), MIXED, GATES, BETAS, cache()) is None
    assert adapter.why_not(layer(lower_bound=-5.0), MIXED, GATES.flatten(2), BETAS.half(), cache()) is None
    assert adapter.shape_of(layer(lower_bound=-5.0)) == Shape(2, 16, 16, 4, -5.0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((layer(), (MIXED,) * 3, GATES, BETAS, cache()), "projections that are not tensors"),
        ((layer(num_k_heads=1), MIXED, GATES, BETAS, cache()), "2 value heads on 1 key and 2 query heads"),
        ((layer(), MIXED, GATES[0], BETAS, cache()), "gates of (8, 2, 16)"),
        ((layer(), MIXED, GATES[:, :7], BETAS, cache()), "gates of (1, 7, 2, 16)"),
        ((layer(), MIXED, GATES, BETAS[0], cache()), "betas of (8, 2)"),
        ((layer(), MIXED, GATES, BETAS, cache(replayssm_rawv=BETAS)), "states that are kept as steps"),
        ((layer(), MIXED, GATES, BETAS, cache(temporal=torch.empty(6, 2, 16, 16)[::2])), "strided state pools"),
        (
            (layer(), torch.empty(8, 192, dtype=HALF)[:, ::2], GATES, BETAS, cache()),
            "projections whose rows are not contiguous",
        ),
        ((layer(dt_bias=torch.empty(64)[::2]), MIXED, GATES, BETAS, cache()), "weights that are not contiguous"),
        ((layer(activation="gelu"), MIXED, GATES, BETAS, cache()), "no kernel for the activation 'gelu'"),
        (
            (layer(), MIXED, GATES, BETAS, cache(conv=[torch.empty(3, 96, 3, dtype=HALF)])),
            "no kernel for windows of (3, 96)",
        ),
    ],
)
def test_layers_that_are_refused(given: tuple[Any, ...], reason: str) -> None:
    assert adapter.why_not(*given) == reason


def test_accepted_states_that_an_extend_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Served, "__init__", lambda self, runner: None)
    backend = types.SimpleNamespace(accept_lens_pool=None)
    whole = types.SimpleNamespace(linear_attn_backend=backend)
    runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(attn_backend=whole))
    adapter.Served(runner)
    backend.accept_lens_pool = torch.empty(3)
    with pytest.raises(FallBack, match="accepted states that an extend stages"):
        adapter.Served(runner)


def test_where_it_is_known(release_root: Root) -> None:
    for release in wheels.RELEASES:
        found = plan.ask(KERNEL, tree.Source(tree.Folder(release_root(release))))
        assert found.verdict.value == ("affected" if release in SERVED else "absent"), (release, found)
        if release not in SERVED:
            itself = release in ("0.5.22", "0.5.23")
            assert ("captures these layers itself" if itself else "powers of two") in found.reason, found
            if itself:
                assert [item.where for item in found.evidence] == [f"{BACKEND}.{places.SEAM}"], found


DRIFTED = {
    "SGLang says in another way that it captures these layers": (
        *("0.5.23", "sglang/srt/layers/attention/linear/kda_backend.py"),
        *("def supports_prefill_graph_extend(", "def captures_prefill("),
    ),
    "the backend does something else with gates": (
        *("0.5.20", "sglang/srt/layers/attention/linear/kda_backend.py"),
        *("gate_was_flat = a.ndim == 3", "gate_was_flat = a.ndim == 5"),
    ),
    "the gate is another": (
        *("0.5.17", "sglang/kernels/ops/attention/fla/kda.py"),
        *("b_gate = lower_bound * tl.sigmoid", "b_gate = 2 * lower_bound * tl.sigmoid"),
    ),
}


@pytest.mark.parametrize("asked", [None, "triton", "reference"])
def test_it_runs_by_name_alone(release_root: Root, asked: str | None) -> None:
    choice = OPERATION.chosen(release_root(ONE), asked)
    assert (choice.impl and choice.impl.name) == asked
    assert asked or choice.rejected["triton"].startswith(f"only with {KERNEL.flag}=triton: unproven on this release")


@pytest.mark.parametrize("asked", [False, True], ids=["auto", "by name"])
def test_by_default_a_measured_model_alone_is_served(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=asked))
    served = adapter.Served.__new__(adapter.Served)

    def refused(name: str) -> str:
        config = types.SimpleNamespace(hf_config=types.SimpleNamespace(architectures=[name]))
        try:
            served.refuse_model(types.SimpleNamespace(model_config=config))
        except FallBack as reason:
            return str(reason)
        return ""

    other = "KimiK3ForConditionalGeneration"
    unmeasured = f"{other}, which was not measured on this release; {KERNEL.flag}=triton takes it"
    assert refused("KimiLinearForCausalLM") == "" and refused(other) == ("" if asked else unmeasured)
    monkeypatch.setattr(served, "cache", lambda layer_id: cache(temporal=torch.empty(3, 2, 16, 16, dtype=HALF)))
    monkeypatch.setattr(adapter, "why_not", lambda *given: "the layer is asked")
    served.layers, left = {}, list[str]()
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=asked, fall_back=left.append))
    assert not served.takes(layer(), MIXED, GATES, BETAS)
    halves = f"states in {HALF}, which were not measured; {KERNEL.flag}=triton takes bfloat16"
    assert left == ["the layer is asked" if asked else halves]
