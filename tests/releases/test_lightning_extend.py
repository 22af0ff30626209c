# SPDX-License-Identifier: Apache-2.0
"""Lightning attention captured, against each release's own eager prefill, on the CPU."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.fixes import hybrids_without_graphs
from sglang_bcg_fixes.kernels.lightning_extend import adapter
from sglang_bcg_fixes.kernels.lightning_extend.declaration import KERNEL, NO_GAIN
from sglang_bcg_fixes.planning import plan, registry
from sglang_bcg_fixes.source import tree
from tests import processes, wheels
from tests.mutated import rewritten
from tests.releases import lightning_prefill, lightning_steps
from tests.wheels import NEWEST

Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]

# later ones replay no batch that leaves most of a bucket empty
ONE = "0.5.12.post1"
# of each form of backend, kernels and break
RELEASES = (ONE, "0.5.15.post1", "0.5.20", NEWEST)
BAILING, SALA = "bailing_full", "minicpm_sala"
# earlier releases do not have the other model
RUN = (
    (ONE, BAILING),
    ("0.5.15.post1", BAILING),
    *((release, model) for release in RELEASES[2:] for model in (BAILING, SALA)),
)
# whose kernels write checkpoints
WITH_CHECKPOINTS = RELEASES[2:]
NOT_KEPT = "checkpoints for the prefix cache, which the kernels of this release do not write"
# of a model: its layers of attention, and all that break
BREAKS = {BAILING: (1, 2), SALA: (1, 3)}
MEASURED = ("logits", "state", "first state", "kept state", "first kept state")
# of kernels that round otherwise: of the first layer, and of what is behind it
FIRST, LAST = 1e-6, 0.002
# of fp32, which the interpreter multiplies without TF32
EXACT = 5e-7
NOTICED = 0.05


@pytest.fixture
def run(release_root: Root) -> Callable[..., Found]:
    def run(release: str, scenario: str, model: str, form: str = "seg_la", **environment: str) -> Found:
        found: Found
        found, _ = processes.beside(
            release_root(release),
            *("-m", "tests.releases.lightning_prefill", scenario, model),
            environment={KERNEL.flag: form, registry.declared_in(hybrids_without_graphs).flag: "on", **environment},
            timeout=600,
        )
        return found

    return run


def assert_same(found: Found) -> None:
    assert all(found[name] == 0.0 for name in MEASURED if name in found), found
    assert {"logits", "state"} <= set(found) and found["nobody's"]


def assert_captured_with_the_bits_of_eager(report: Found, model: str) -> None:
    assert set(report["breaks"].values()) == {BREAKS[model][0]}
    assert report["scripts"] and len(report["scripts"]) == len(report["again"])
    for script in report["scripts"]:
        assert_same(script)
        assert set(script["replays"]) == {BREAKS[model][0] + 1}, script
    # whatever the tables and the padding held before
    for script in report["again"]:
        assert_same(script)
    assert report["left"] == {}


def test_replays_have_the_bits_of_eager_prefill_and_break_at_attention_only(run: Callable[..., Found]) -> None:
    assert_captured_with_the_bits_of_eager(run(ONE, "right", BAILING), BAILING)


@pytest.mark.parametrize(("release", "model"), RUN[1:])
def test_so_they_have_on_other_releases(run: Callable[..., Found], release: str, model: str) -> None:
    assert_captured_with_the_bits_of_eager(run(release, "brief", model), model)


def test_prompts_mixed_with_decode_have_them_too(run: Callable[..., Found]) -> None:
    assert_captured_with_the_bits_of_eager(run(NEWEST, "mixed", SALA), SALA)


def test_padding_that_is_nan_reaches_no_token(run: Callable[..., Found]) -> None:
    report = run("0.5.20", "poisoned", SALA)
    assert report["padded"] and any(any(script["replays"]) for script in report["scripts"])
    for script in (*report["scripts"], *report["again"]):
        assert_same(script)


def assert_captured_and_right(report: Found, model: str) -> None:
    assert set(report["breaks"].values()) == {BREAKS[model][0]} and report["left"] == {}
    for script in report["scripts"]:
        for name in MEASURED:
            assert script.get(name, 0.0) <= (FIRST if name.startswith("first") else LAST), script
        assert set(script["replays"]) == {BREAKS[model][0] + 1} and script["nobody's"], script
    for script in report["again"]:
        assert_same(script)


@pytest.mark.parametrize(("release", "model"), [(ONE, BAILING), ("0.5.20", SALA), (NEWEST, BAILING), (NEWEST, SALA)])
def test_the_triton_kernels_are_right_too(run: Callable[..., Found], release: str, model: str) -> None:
    assert_captured_and_right(run(release, "brief", model, "triton"), model)


@pytest.mark.parametrize("release", ["0.5.15.post1", NEWEST])
def test_they_write_checkpoints_on_every_release(run: Callable[..., Found], release: str) -> None:
    report = run(release, "checkpoints", BAILING, "triton")
    assert_captured_and_right(report, BAILING)
    assert all("first kept state" in script for script in report["scripts"])
    assert run(release, "warm", BAILING, "triton") == {"logits": 0.0, "state": 0.0, "left": {}}


@pytest.mark.parametrize("form", ["seg_la", "triton"])
@pytest.mark.parametrize("model", BREAKS)
def test_a_replay_has_the_bits_of_the_same_form_without_a_graph(
    run: Callable[..., Found], model: str, form: str
) -> None:
    report = run(NEWEST, "own_eager", model, form)
    for script in report["scripts"]:
        assert_same(script)
        assert set(script["replays"]) == {0}


@pytest.mark.parametrize("release", WITH_CHECKPOINTS)
def test_checkpoints_for_the_prefix_cache_are_written_from_inside(run: Callable[..., Found], release: str) -> None:
    report = run(release, "checkpoints", BAILING)
    assert_captured_with_the_bits_of_eager(report, BAILING)
    assert all("first kept state" in script for script in report["scripts"])


@pytest.mark.parametrize("release", WITH_CHECKPOINTS)
def test_a_warm_prefix_cache_answers_as_a_cold_one(run: Callable[..., Found], release: str) -> None:
    assert run(release, "warm", BAILING) == {"logits": 0.0, "state": 0.0, "left": {}}


def test_where_the_kernels_write_no_checkpoints_the_break_stays(run: Callable[..., Found]) -> None:
    report = run("0.5.15.post1", "without_checkpoints", BAILING)
    assert report == {"breaks": {"80": BREAKS[BAILING][1]}, "left": {NOT_KEPT: 1}}


@pytest.mark.parametrize("model", BREAKS)
def test_batches_that_captured_kernels_cannot_serve_run_eagerly(run: Callable[..., Found], model: str) -> None:
    report = run(NEWEST, "refused", model)
    assert_same(report["not too many"])
    assert set(report["not too many"]["replays"]) == {BREAKS[model][0] + 1}
    assert_same(report["too many"])
    assert report["too many"]["replays"] == [0]
    assert report["left"] == {"more than 2 sequences in a batch": 1}


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_a_layer_that_is_not_served_keeps_the_break(run: Callable[..., Found], release: str) -> None:
    report = run(release, "configured", BAILING)
    assert set(report["breaks"].values()) == {BREAKS[BAILING][1]}
    assert_same(report["script"])
    assert report["left"] == {"linear_backend minimax": 1}


def test_switched_off_the_break_stays(run: Callable[..., Found]) -> None:
    report = run(NEWEST, "brief", SALA, "off")
    assert set(report["breaks"].values()) == {BREAKS[SALA][1]}
    assert report["left"] == {}


def test_mutants_are_noticed(run: Callable[..., Found]) -> None:
    found = run(NEWEST, "mutants", SALA)
    assert set(found) == {"none", *lightning_prefill.MUTANTS}
    assert found.pop("none") == 0.0
    missed = {name: seen for name, seen in found.items() if not isinstance(seen, str) and seen < NOTICED}
    assert missed == {}


def steps(root: pathlib.Path, *arguments: str) -> Found:
    found: Found
    found, _ = processes.beside(root, "-m", "tests.releases.lightning_steps", *arguments)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_random_steps_have_the_bits_of_sglangs_kernels_run_eagerly(release_root: Root, release: str) -> None:
    found = steps(release_root(release))
    assert len(found) == 8
    assert {step: wrong for case in found.values() for step, wrong in case.items() if wrong} == {}
    assert all(set(lightning_steps.STEPS) == set(case) for name, case in found.items() if name.endswith("4"))


@pytest.mark.parametrize("mutant", [name for name in lightning_steps.MUTANTS if name != "none"])
def test_mutants_of_the_form_are_noticed(release_root: Root, mutant: str) -> None:
    found = steps(release_root(NEWEST), mutant)
    assert any(wrong for case in found.values() for wrong in case.values()), found


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_the_triton_kernels_are_no_further_off_than_sglangs(release_root: Root, kind: str) -> None:
    found, _ = processes.beside(release_root(NEWEST), "-m", "tests.scenarios.lightning_accuracy", kind)
    ours, sglangs = found["ours"], found["SGLang's"]
    assert ours["output"] <= max(1.1 * sglangs["output"], EXACT), found
    # in two halves of bfloat16, where a GPU's TF32 has fewer digits than the interpreter
    assert ours["state"] <= (1e-5 if kind == "bfloat16" else EXACT), found
    assert sglangs["output"] > 0, found


# what is decided without a model


def layer(**changed: Any) -> Any:
    plain = {"layer_id": 0, "tp_q_head_num": 2, "head_dim": 128, "qk_head_dim": 128, "v_head_dim": 128, "k_scale": None}
    return types.SimpleNamespace(**{**plain, **changed})


def linear(**changed: Any) -> Any:
    return types.SimpleNamespace(**{"linear_backend": "seg_la", "kv_cache_dtype_str": "auto", **changed})


def cache(**changed: Any) -> Any:
    return types.SimpleNamespace(**{"temporal": torch.empty(3, 2, 128, 128), **changed})


ROWS = torch.empty(8, 2, 128)


def test_a_plain_layer_is_taken() -> None:
    assert adapter.why_not(layer(), linear(), cache(), ROWS, ROWS, ROWS, {"save_kv_cache": False}) is None


def test_so_is_one_whose_rows_are_flat() -> None:
    flat = torch.empty(8, 256)
    assert adapter.why_not(layer(), linear(), cache(), flat, flat, flat, {}) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((layer(), linear(linear_backend="minimax"), cache(), ROWS, ROWS, ROWS, {}), "linear_backend minimax"),
        ((layer(), linear(), cache(), ROWS, ROWS, ROWS, {"q_rope": ROWS}), "a layer that is given q_rope"),
        (
            (layer(k_scale=1.0), linear(kv_cache_dtype_str="fp8_e4m3"), cache(), ROWS, ROWS, ROWS, {}),
            "queries in the dtype of a cache with scales",
        ),
        ((layer(), linear(), cache(), ROWS, None, None, {}), "projections that are not tensors"),
        ((layer(v_head_dim=64), linear(), cache(), ROWS, ROWS, ROWS, {}), "keys of 128 and values of 64"),
        (
            (layer(), linear(), cache(), ROWS, ROWS[:, :1], ROWS[:, :1], {}),
            "no kernel for 1 heads of keys for 2 of queries",
        ),
        (
            (layer(), linear(), cache(), ROWS, ROWS, ROWS.half(), {}),
            "no kernel for queries in torch.float32, keys in torch.float32 and values in torch.float16",
        ),
        (
            (layer(), linear(), cache(), torch.empty(8, 128, 2).mT, ROWS, ROWS, {}),
            "no kernel for projections whose heads are not contiguous",
        ),
        (
            (layer(), linear(), cache(temporal=torch.empty(6, 2, 128, 128)[::2]), ROWS, ROWS, ROWS, {}),
            "no kernel for strided state pools",
        ),
        (
            (layer(), linear(), cache(temporal=torch.empty(3, 2, 64, 128)), ROWS, ROWS, ROWS, {}),
            "no kernel for states of (2, 64, 128)",
        ),
        (
            (layer(), linear(), cache(temporal=torch.empty(3, 2, 128, 128).half()), ROWS, ROWS, ROWS, {}),
            "no kernel for states in torch.float16",
        ),
    ],
)
def test_layers_that_are_refused(given: tuple[Any, ...], reason: str) -> None:
    assert adapter.why_not(*given) == reason


@pytest.mark.parametrize(
    ("heads", "head", "reason"), [(3, 128, "no kernel for 3 heads"), (2, 64, "no kernel for heads of 64")]
)
def test_sizes_that_are_refused(heads: int, head: int, reason: str) -> None:
    rows, states = torch.empty(8, heads, head), cache(temporal=torch.empty(3, heads, head, head))
    sized = layer(tp_q_head_num=heads, head_dim=head, qk_head_dim=head, v_head_dim=head)
    assert adapter.why_not(sized, linear(), states, rows, rows, rows, {}) == reason


def test_layers_are_routed_as_sglang_routes_them() -> None:
    listed = types.SimpleNamespace(full_attn_layers=[1])
    asked = types.SimpleNamespace(full_attn_layers=[1], _is_full_attn=lambda layer: layer.layer_id == 0)
    assert [adapter.is_full_attention(listed, layer(layer_id=number)) for number in (0, 1)] == [False, True]
    assert [adapter.is_full_attention(asked, layer(layer_id=number)) for number in (0, 1)] == [True, False]


def test_the_source_is_known(release_root: Root) -> None:
    for release in wheels.RELEASES:
        source = tree.Source(tree.Folder(release_root(release)))
        assert plan.ask(KERNEL, source).verdict.value == "affected", release


LIGHTNING = "sglang/srt/layers/attention/linear/lightning_backend.py"
SEG_LA = "sglang/kernels/ops/attention/linear/seg_la.py"
DRIFTED = {
    "the layer computes something else": (NEWEST, LIGHTNING, "softmax_scale=layer.scaling,", "softmax_scale=1.0,"),
    "the launch is another": (NEWEST, SEG_LA, "V_SPLIT_DIM = 32 if bs <= 2 else 64", "V_SPLIT_DIM = 64"),
    "the kernel is another": (NEWEST, SEG_LA, "k = k * decays[None, :]", "k = k * inv_decays[None, :]"),
    "checkpoints are others": (NEWEST, LIGHTNING, "boundary_lens < extend_lens", "boundary_lens <= extend_lens"),
    "the metadata is another": (
        *("0.5.15.post1", "sglang/srt/layers/attention/linear/linear_metadata.py"),
        *("has_initial_states = context_lens_tensor > 0", "has_initial_states = context_lens_tensor > 1"),
    ),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_drifted_source_is_unknown(release_root: Root, drift: str) -> None:
    release, *change = DRIFTED[drift]
    found = plan.ask(KERNEL, tree.Source(rewritten(release_root(release), *change)))
    assert found.verdict.value == "unknown", found


@pytest.mark.parametrize("asked", [None, "seg_la", "triton"])
def test_it_runs_by_name_alone(release_root: Root, asked: str | None) -> None:
    found = registry.discover()
    settings = flags.read(found.fixes, found.kernels, {} if asked is None else {KERNEL.flag: asked})
    made = plan.make(found, settings, tree.Source(tree.Folder(release_root(NEWEST))))
    (choice,) = (choice for choice in made.kernels if choice.op == KERNEL.op)
    assert (choice.impl and choice.impl.name) == asked
    assert asked or all(NO_GAIN in choice.rejected[impl.name] for impl in KERNEL.impls)


def test_the_self_check_calls_it_right(release_root: Root) -> None:
    found, log = processes.beside(
        release_root(NEWEST),
        *("-m", "tests.releases.selfcheck_run", SALA, "--server", '{"dtype": "float16"}'),
        environment={KERNEL.flag: "seg_la", "SGLANG_BCG_SELFCHECK": "strict"},
        timeout=300,
    )
    assert found["selfcheck"]["verdict"] == "right" and found["refused"] is None and found["touched"] == [], found
    assert found["prefills"][0]["replays"] == BREAKS[SALA][0] + 1
    assert "bcg-fixes self-check: right: 7 of 7 compared" in log
