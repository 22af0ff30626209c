# SPDX-License-Identifier: Apache-2.0
"""Gated delta net captured with kernels of ours, against each release's own eager prefill, on the CPU."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.cuda import driver
from sglang_bcg_fixes.kernels.gdn_extend import adapter
from sglang_bcg_fixes.kernels.gdn_extend.declaration import KERNEL, NOT_MEASURED
from sglang_bcg_fixes.kernels.linear_extend import serving
from tests.releases import gdn_prefill
from tests.releases.linear_extend_tests import (  # noqa: F401
    Found,
    Operation,
    Root,
    Run,
    operation,
    test_it_stands_back_where_a_backend_answers_for_itself,
    test_the_source_is_known,
)
from tests.wheels import NEWEST, since

# one of each form of runner, backend and layer that our kernels know
RELEASES = (*("0.5.11", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16"), *since("0.5.17"))
ONE = "0.5.12.post1"
QWEN3_NEXT, QWEN3_5 = "qwen3next", "qwen3_5_text"
# two roundings to bfloat16 are so far apart
ROUNDED = 0.004
# of states and windows of the first layer: SGLang's own kernels round on the way, ours do not; of what comes behind it
# the model's own roundings in fp16 are the larger part
LIMITS = {
    **{"first conv": 0.0, "first state": 0.002, "first kept conv": 0.0, "first kept state": 0.002},
    **{"logits": 0.05, "conv": 0.02, "state": 0.02, "kept conv": 0.02, "kept state": 0.02},
}
# one has two such layers and one of attention between them, the other four layers, every second one of attention
BREAKS = {QWEN3_NEXT: (1, 3), QWEN3_5: (2, 4)}
ATTENTION_LAYERS, LAYERS = BREAKS[QWEN3_NEXT]
OPERATION = Operation(KERNEL, "tests.releases.gdn_prefill", BREAKS, LIMITS)


@pytest.fixture
def run(release_root: Root) -> Run:
    def run(release: str, *arguments: str, **others: str) -> Found:
        return OPERATION.run(release_root(release), *arguments, **others)

    return run


def test_replays_are_right_and_break_at_attention_only(run: Run) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "right", QWEN3_NEXT), QWEN3_NEXT)


@pytest.mark.parametrize("release", [release for release in RELEASES if release != ONE])
def test_so_they_are_on_other_releases(run: Run, release: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "brief", QWEN3_NEXT), QWEN3_NEXT)


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_so_they_are_where_adaptive_speculation_has_put_another_backend_in_place(run: Run, release: str) -> None:
    report = run(release, "other_backend", QWEN3_NEXT)
    for script in report["scripts"]:
        OPERATION.assert_right(script, QWEN3_NEXT)
    assert report["left"] == {}


@pytest.mark.parametrize("release", since("0.5.19"))
def test_so_are_those_of_qwen3_5(run: Run, release: str) -> None:
    OPERATION.assert_captured_and_right(run(release, "brief", QWEN3_5), QWEN3_5)


def test_chunks_mixed_with_decoding_are_replayed_too(run: Run) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "mixed", QWEN3_NEXT), QWEN3_NEXT)


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_states_in_bfloat16_are_captured_by_name(run: Run, release: str) -> None:
    in_halves = {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}
    report = run(release, "brief", QWEN3_NEXT, **in_halves)
    OPERATION.assert_breaks(report, ATTENTION_LAYERS)
    for script in report["scripts"]:
        # a state is rounded once a step, by SGLang too
        assert all(script[name] <= max(LIMITS[name], ROUNDED) for name in OPERATION.measured(script)), script
        assert set(script["replays"]) == {ATTENTION_LAYERS + 1} and script["nobody's"]
    for script in report["again"]:
        OPERATION.assert_same(script)


def test_the_triton_kernels_are_right_too(run: Run) -> None:
    OPERATION.assert_captured_and_right(run(ONE, "short", QWEN3_NEXT, "triton"), QWEN3_NEXT)


@pytest.mark.parametrize("release", ["0.5.11", ONE, "0.5.15.post1", NEWEST])
def test_the_cuda_source_is_right_with_what_a_layer_gives_it(run: Run, release: str) -> None:
    report = run(release, "in_cuda", QWEN3_NEXT, "cuda")
    OPERATION.assert_captured_and_right(report, QWEN3_NEXT)
    # none of its launches was left to Triton's kernels
    assert report["launched"]["prepare"] == report["launched"]["advance"] > 0


# with those whose backend, runner or bookkeeping of checkpoints is another one than before
@pytest.mark.parametrize("release", [ONE, "0.5.15.post1", "0.5.16", *since("0.5.18")])
def test_checkpoints_for_the_prefix_cache_are_written_from_inside(run: Run, release: str) -> None:
    OPERATION.assert_checkpoints(run(release, "checkpoints", QWEN3_NEXT), QWEN3_NEXT)


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_batches_that_captured_kernels_cannot_serve_run_eagerly(run: Run, release: str) -> None:
    OPERATION.assert_refused_run_eagerly(run(release, "refused", QWEN3_NEXT), QWEN3_NEXT)


@pytest.mark.parametrize("release", [ONE, NEWEST])
def test_a_configuration_that_is_not_served_keeps_the_break(run: Run, release: str) -> None:
    report = run(release, "configured", QWEN3_NEXT)
    OPERATION.assert_breaks(report, LAYERS, {"deterministic inference": 1})
    OPERATION.assert_same(report["script"])
    assert set(report["script"]["replays"]) == {LAYERS + 1}


def test_without_the_fix_that_adds_the_break_nothing_is_captured(run: Run) -> None:
    report = run(ONE, "nothing", QWEN3_NEXT, SGLANG_BCG_FIX_LINEAR_ATTENTION_CAPTURED="off")
    assert "captured nothing" in report["said"]


def test_switched_off_the_break_stays(run: Run) -> None:
    OPERATION.assert_breaks(run(ONE, "configured", QWEN3_NEXT, "off"), LAYERS)


def test_mutants_are_noticed(run: Run) -> None:
    OPERATION.assert_noticed(run(ONE, "mutants", QWEN3_NEXT), gdn_prefill.MUTANTS)


# what is decided without a model


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("enable_deterministic_inference", True, "deterministic inference"),
        ("enable_two_batch_overlap", True, "two-batch overlap"),
        ("enable_dp_attention", True, "DP attention"),
        ("attn_dp_size", 2, "DP attention"),
        ("attn_cp_size", 2, "context parallelism"),
        ("pp_size", 2, "pipeline stages"),
        ("enable_hierarchical_cache", True, "states that are loaded layer by layer"),
        ("enable_unified_cache_external_linker", True, "states that are loaded layer by layer"),
        ("enable_mis", True, "items that are scored side by side"),
        ("enable_linear_replayssm", True, "states that are kept as steps"),
    ],
)
def test_configurations_that_are_refused(option: str, value: Any, reason: str) -> None:
    arguments = types.SimpleNamespace(**{"pp_size": 1, option: value})
    assert serving.refused_options(arguments) == [reason]


def test_sizes_are_those_that_options_come_to() -> None:
    arguments, parallel = types.SimpleNamespace(pp_size=1), types.SimpleNamespace(attn_cp_size=2, attn_dp_size=4)
    assert serving.refused_options(arguments, parallel) == ["DP attention", "context parallelism"]


def test_a_plain_configuration_is_not_refused() -> None:
    assert serving.refused_options(types.SimpleNamespace(pp_size=1, enable_dp_attention=False)) == []


def batch(**changed: Any) -> Any:
    two = [0, 0]
    plain = {
        "forward_mode": types.SimpleNamespace(name="EXTEND"),
        "req_pool_indices": two,
        "extend_seq_lens": two,
        "mamba_track_mask": None,
    }
    return types.SimpleNamespace(**{**plain, **changed})


def served(tracking: bool = False) -> adapter.Served:
    found = adapter.Served.__new__(adapter.Served)
    found.tables = types.SimpleNamespace(max_sequences=2)
    found.tracking, found.pool = tracking, types.SimpleNamespace(layer_transfer_counter=None)
    return found


@pytest.mark.parametrize("named", [False, True], ids=["auto", "by name"])
def test_states_in_bfloat16_keep_the_break_unless_an_implementation_is_named(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    runner = served()
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=named))
    monkeypatch.setattr(adapter, "why_not", lambda *given: "the layer is asked")
    for kept, measured in ((torch.float32, True), (torch.bfloat16, False)):
        cache = types.SimpleNamespace(temporal=torch.empty(0, dtype=kept))
        monkeypatch.setattr(runner, "cache", functools.partial(dict.__getitem__, {0: cache}))
        reason = runner.refusal_of(types.SimpleNamespace(layer_id=0), None, None, None)
        unmeasured = f"states in {kept}, which were not measured; {KERNEL.flag}=cuda takes bfloat16"
        assert reason == ("the layer is asked" if named or measured else unmeasured)


def test_states_in_float16_keep_the_break(run: Run) -> None:
    report = run(ONE, "brief", QWEN3_NEXT, SGLANG_MAMBA_SSM_DTYPE="float16")
    OPERATION.assert_breaks(report, LAYERS, {"no kernel for states in torch.float16": 2})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"forward_mode": types.SimpleNamespace(name="TARGET_VERIFY")}, "a batch of mode TARGET_VERIFY"),
        ({"forward_mode": types.SimpleNamespace(name="DRAFT_EXTEND")}, "a batch of mode DRAFT_EXTEND"),
        ({"forward_mode": types.SimpleNamespace(name="DRAFT_EXTEND_V2")}, "a batch of mode DRAFT_EXTEND_V2"),
        ({"forward_mode": types.SimpleNamespace(name="SPLIT_PREFILL")}, "a batch of mode SPLIT_PREFILL"),
        ({"req_pool_indices": [0, 0, 0]}, "more than 2 sequences in a batch"),
        ({"extend_seq_lens": [0]}, "other lengths than requests"),
        ({"extend_seq_lens": None}, "other lengths than requests"),
        ({"mamba_track_mask": [True, False]}, "checkpoints that were not captured"),
        ({"tbo_children": []}, "a batch with tbo_children"),
        ({"multi_item_delimiter_indices": object()}, "a batch with multi_item_delimiter_indices"),
        ({"global_num_tokens_cpu": [4, 4]}, "a batch with global_num_tokens_cpu"),
    ],
)
def test_batches_that_are_refused(changed: Found, reason: str) -> None:
    with pytest.raises(serving.FallBack, match=reason):
        served().refuse(batch(**changed))


@pytest.mark.parametrize("interpreted", [False, True])
def test_implementations_that_run_without_a_gpu(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_interpreted", lambda: interpreted)
    implementations = [impl.name for impl in KERNEL.impls if serving.runs_on_the_host(impl.name)]
    assert implementations == ["triton"] * interpreted + ["reference"]


def test_what_was_not_asked_about_before_a_replay_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=f"replayed an unsupported prefill: more than 2 sequences in a batch. Set {KERNEL.flag}=off"
    ):
        served().fill(None, batch(req_pool_indices=[0, 0, 0]))


def test_the_tables_of_a_step_are_good_for_one_replay() -> None:
    filled, whole = [], batch(extend_prefix_lens=[0, 0])
    found = served()
    found.unit, found.is_filled = None, False
    found.tables.fill = lambda *given: filled.append(given)
    backend = types.SimpleNamespace(forward_metadata=types.SimpleNamespace(mamba_cache_indices=[1, 2]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"the states of an earlier batch. Set {KERNEL.flag}=off"):
            found.use_up()
        found.fill(backend, whole)
        found.use_up()
    assert filled == [([0, 0], [1, 2], [0, 0], None)] * 2


def test_batches_that_are_served() -> None:
    served().refuse(batch())
    served().refuse(batch(forward_mode=types.SimpleNamespace(name="MIXED")))
    served(tracking=True).refuse(batch(mamba_track_mask=[True, False]))


def test_checkpoints_of_other_rows_are_refused() -> None:
    with pytest.raises(serving.FallBack, match="other checkpoints than requests"):
        served(tracking=True).refuse(batch(mamba_track_mask=[True]))


def test_auto_changes_nothing_without_a_driver(release_root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", no_driver)
    choice = OPERATION.chosen(release_root(ONE))
    assert choice.impl is None
    assert "no driver here" in choice.rejected["cuda"] and NOT_MEASURED in choice.rejected["triton"]


def no_driver() -> None:
    raise driver.DriverError("no driver here")


def test_auto_is_cuda_where_there_is_a_driver(release_root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: None)
    choice = OPERATION.chosen(release_root(ONE))
    assert choice.impl is not None and choice.impl.name == "cuda" and not choice.required


@pytest.mark.parametrize("required", [False, True], ids=["auto", "by name"])
def test_a_device_that_cannot_run_it(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=required, fall_back=left.append))
    monkeypatch.setattr(serving, "makes_breakable_graphs", lambda runner: True)

    def cannot(runner: object) -> None:
        raise active.CannotRun("gdn_extend", "cuda", "it is an sm_80")

    monkeypatch.setattr(adapter.OPERATION, "served", cannot)
    if required:
        with pytest.raises(RuntimeError, match="Set SGLANG_BCG_KERNEL_GDN_EXTEND=off to serve without it"):
            adapter.OPERATION.begin(None)
    else:
        assert adapter.OPERATION.begin(None) is None
    assert left == ([] if required else ["cuda does not run on this device: it is an sm_80"])


@pytest.mark.parametrize("required", [False, True], ids=["auto", "by name"])
def test_a_server_that_cannot_be_read_keeps_its_breaks(required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(active, "selected", lambda op: types.SimpleNamespace(required=required, fall_back=left.append))
    monkeypatch.setattr(serving, "makes_breakable_graphs", lambda runner: True)
    monkeypatch.setattr(adapter.OPERATION, "served", lambda runner: runner.nothing_known)
    if required:
        with pytest.raises(RuntimeError, match="Set SGLANG_BCG_KERNEL_GDN_EXTEND=off to serve without it"):
            adapter.OPERATION.begin(None)
    else:
        assert adapter.OPERATION.begin(None) is None
        # before there are graphs, too
        assert "cannot read (AttributeError: " in str(adapter.OPERATION.why_not_all(None, {}))
    assert len(left) == (not required) and all("cannot read (AttributeError: " in why for why in left)
