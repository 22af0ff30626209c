# SPDX-License-Identifier: Apache-2.0
"""Models that SGLang refuses prefill graphs: admitted in real releases, and answered as without graphs."""

from __future__ import annotations

import json
import logging
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpu_sglang import architectures
from sglang_bcg_fixes.anatomy import forward_batch, latent_attention, ranks, short_convolutions
from sglang_bcg_fixes.anatomy.runners import SETUP_MODULE
from sglang_bcg_fixes.concern import Launch
from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.fixes import hybrids_without_graphs as fix
from sglang_bcg_fixes.fixes.hybrids_without_graphs import feed_forward, latent, measured, mixers, refusals
from sglang_bcg_fixes.kernels.mamba2_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.short_conv_extend import declaration as short_conv_extend
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.planning import plan
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import processes
from tests.fixes import breaks
from tests.mutated import rewritten
from tests.releases import test_mamba2_extend
from tests.scenarios.admitted_hybrids import LAYERS, MUTANTS, breaks_of, overrides_of
from tests.wheels import NEWEST

FIX = declared_in(fix)
Root = Callable[[str], pathlib.Path]
Found = dict[str, Any]
Run = Callable[..., Found]

ONE = "0.5.12.post1"
RELEASES = (ONE, "0.5.15.post1", "0.5.20", NEWEST)
GRANITE, LFM2, LFM2_MOE, BAILING, NEMOTRON = LAYERS
# where SGLang refuses NemotronH; before, it captures it
COUNTING = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", NEWEST)
ON, AUTO = ({FIX.flag: state} for state in ("on", "auto"))
# windows as the model's, which is in half precision here
INSIDE = {"SGLANG_MAMBA_CONV_DTYPE": "float16"}
STEPS = [
    *((release, architecture) for release in RELEASES for architecture in (GRANITE, LFM2)),
    (NEWEST, LFM2_MOE),
    # whose convolutions another fix is round
    *(("0.5.11", architecture) for architecture in (LFM2, LFM2_MOE)),
    *((release, NEMOTRON) for release in COUNTING),
    # each form of latent attention, and of its replay
    *((release, BAILING) for release in ("0.5.11", *RELEASES, "0.5.16", "0.5.17", "0.5.18")),
]
# SGLang itself replays no latent attention behind a prefix there
NO_PREFIXES = ("0.5.16", "0.5.17")
REFUSED = "some layers do not apply Standard GQA"


@pytest.fixture
def run(release_root: Root) -> Run:
    def run(release: str, scenario: str, architecture: str, **environment: str) -> Found:
        found: Found
        found, _ = processes.beside(
            release_root(release),
            *("-m", "tests.scenarios.admitted_hybrids", scenario, architecture),
            environment={KERNEL.flag: "off", short_conv_extend.KERNEL.flag: "off", **environment},
            timeout=600,
        )
        return found

    return run


def assert_equal(report: Found, segments: int, eagerly: int = 2) -> None:
    assert report["differ"] == [] and report["nobody's"], report
    # later releases replay nothing that leaves most of a bucket empty
    assert set(report["replays"]) <= {0, segments} and report["replays"].count(0) <= eagerly, report


@pytest.mark.parametrize(("release", "architecture"), STEPS)
def test_every_mixer_and_attention_breaks_and_every_bit_is_that_of_eager(
    run: Run, release: str, architecture: str
) -> None:
    found = run(release, "steps", architecture, **ON)
    breaks = breaks_of(architecture)
    assert refusals.ID in found["applied"] and set(found["breaks"].values()) == {breaks}
    eagerly = 8 if architecture == BAILING and release in NO_PREFIXES else 2
    assert_equal(found["poisoned"], breaks + 1, eagerly)
    assert found["too long"] == {"replays": [0, 0], "differ": [], "nobody's": True}


@pytest.mark.parametrize(
    ("release", "architecture", "scenario"),
    [
        *((release, BAILING, "cached") for release in ("0.5.16", "0.5.17", NEWEST)),
        *((release, architecture, "cached") for release in (ONE, NEWEST) for architecture in (GRANITE, LFM2)),
        (NEWEST, GRANITE, "cached_by_extra_buffer"),
        *((release, NEMOTRON, "cached_by_extra_buffer") for release in ("0.5.20", NEWEST)),
    ],
)
def test_a_warm_prefix_cache_answers_as_without_graphs(
    run: Run, release: str, architecture: str, scenario: str
) -> None:
    found = run(release, scenario, architecture, **ON)
    assert found["breaks"] == [breaks_of(architecture)]
    replayed = 1 if architecture == BAILING and release in NO_PREFIXES else 3
    assert found["replays"] >= replayed * (found["breaks"][0] + 1)
    assert max(found["hits"]) >= 64 and found["same hits"] and found["differ"] == [], found


@pytest.mark.parametrize(
    ("release", "architecture"),
    [
        *((release, GRANITE) for release in RELEASES[1:]),
        *((release, NEMOTRON) for release in ("0.5.20", NEWEST)),
        *((release, BAILING) for release in RELEASES[1:]),
    ],
)
def test_checkpoints_from_inside_an_extend_are_those_of_eager(run: Run, release: str, architecture: str) -> None:
    found = run(release, "checkpoints", architecture, **ON, SGLANG_MAMBA_CONV_DTYPE="float16")
    assert found["breaks"] == {"80": breaks_of(architecture)} and found["kept"]
    assert found["differ"] == [] and min(found["replays"]) > 0, found


@pytest.mark.parametrize("architecture", [GRANITE, LFM2, BAILING, NEMOTRON])
def test_two_tensor_parallel_ranks_are_right(run: Run, architecture: str) -> None:
    found = run(NEWEST, "two_ranks", architecture, **ON)
    breaks = breaks_of(architecture)
    for rank in found["ranks"]:
        assert set(rank["breaks"].values()) == {breaks}
        assert_equal(rank, breaks + 1)


@pytest.mark.parametrize(
    ("release", "architecture", "environment"),
    [
        *((release, architecture, {}) for release in (ONE, NEWEST) for architecture in (LFM2, BAILING)),
        (NEWEST, LFM2_MOE, {}),
        # as it would be captured there, if a GPU had shown that release
        ("0.5.20", GRANITE, {}),
        (NEWEST, LFM2, AUTO),
    ],
)
def test_by_default_sglang_refuses_them_and_nothing_is_said(
    run: Run, release: str, architecture: str, environment: dict[str, str]
) -> None:
    kernels = dict.fromkeys((KERNEL.flag, short_conv_extend.KERNEL.flag), "reference")
    found = run(release, "capture_without_experts", architecture, **INSIDE, **kernels, **environment)
    assert (refusals.ID in found["applied"]) is (release == NEWEST) and "captured nothing" in found["captured"]
    ((_, said),) = found["said"]
    assert REFUSED in said


@pytest.mark.parametrize(
    ("release", "architecture"), [(ONE, GRANITE), (NEWEST, LFM2), (ONE, BAILING), (NEWEST, BAILING)]
)
def test_mixers_are_shown_while_graphs_with_breaks_are_set_up(run: Run, release: str, architecture: str) -> None:
    found = run(release, "admission", architecture, **ON)
    assert set(found.pop("captured").values()) == {len(LAYERS[architecture])}
    (said,) = found.pop("said")
    assert f"prefill runs eagerly, as in SGLang: speculation. {FIX.flag}=off ends this message" in said
    del found["applied"]
    assert found.pop("with breaks") and not any(found.values()), found


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_by_default_granite_is_captured_with_all_mixers_inside(run: Run, implementation: str) -> None:
    found = run(NEWEST, "with_kernel_and_no_experts", GRANITE, **INSIDE, **{KERNEL.flag: implementation})
    attention = LAYERS[GRANITE].count("attention")
    assert set(found["breaks"].values()) == {attention} and found["left"] == {}
    assert all(max(script["replays"]) == attention + 1 and script["nobody's"] for script in found["scripts"])


@pytest.mark.parametrize(
    ("scenario", "environment", "reason"),
    [
        # it has some here
        ("capture", {KERNEL.flag: "reference"}, "experts, which nobody has measured"),
        ("capture_without_experts", {KERNEL.flag: "off"}, "mamba2_extend does not run in this process"),
        # SGLang keeps windows in bfloat16, and the model is in float16
        (
            "capture_without_experts",
            {KERNEL.flag: "reference", "SGLANG_MAMBA_CONV_DTYPE": "bfloat16"},
            "mamba2_extend: no kernel for windows in torch.bfloat16",
        ),
        (
            "capture_without_experts",
            {KERNEL.flag: "reference", flag_of(mixers.SSM_BREAK): "off"},
            "a mixer would not break the graph",
        ),
    ],
)
def test_by_default_one_mixer_with_a_break_is_enough_to_leave_granite(
    run: Run, scenario: str, environment: dict[str, str], reason: str
) -> None:
    found = run(NEWEST, scenario, GRANITE, **{**INSIDE, **environment})
    assert refusals.ID in found["applied"] and "captured nothing" in found["captured"]
    (level, said), (_, refused) = found["said"]
    assert level == logging.INFO and f"prefill runs eagerly, as in SGLang: {reason}" in said and REFUSED in refused


@pytest.mark.parametrize("release", ["0.5.19", NEWEST])
def test_by_default_sglang_refuses_nemotron(run: Run, release: str) -> None:
    found = run(release, "counted", NEMOTRON)
    assert (refusals.ID in found["applied"]) is (release == NEWEST) and "captured nothing" in found["captured"]
    assert len(found["said"]) == 2 and all(REFUSED in line for line in found["said"])


def test_feed_forward_layers_count_unless_the_server_does_what_nobody_has_tried(run: Run) -> None:
    found = run(NEWEST, "counted", NEMOTRON, **ON)
    assert "captured nothing" in found["speculation"] and found["restored"]
    said, refused = found["said"]
    assert f"prefill runs eagerly, as in SGLang: speculation. {FIX.flag}=off ends this message" in said
    assert REFUSED in refused and set(found["captured"].values()) == {breaks_of(NEMOTRON)}


@pytest.mark.parametrize("environment", [{}, ON], ids=["by default", "on"])
def test_before_sglang_counts_layers_nothing_changes_for_nemotron(run: Run, environment: dict[str, str]) -> None:
    found = run("0.5.18", "steps", NEMOTRON, **environment)
    assert set(found["breaks"].values()) == {breaks_of(NEMOTRON)}
    assert_equal(found["poisoned"], breaks_of(NEMOTRON) + 1)


def test_without_the_break_of_its_mixers_granite_is_left_alone(run: Run) -> None:
    found = run(NEWEST, "admission", GRANITE, **ON, SGLANG_BCG_FIX_SSM_MIXER_CAPTURED="off")
    assert "captured nothing" in found["captured"] and not found["with breaks"]
    assert "a mixer would not break the graph" in found["said"][0] and REFUSED in found["said"][-1]


@pytest.mark.parametrize(
    ("release", "missing"), [(ONE, latent_attention.CHOOSES_THE_FORM), ("0.5.17", latent_attention.PREPARES_THE_FORM)]
)
def test_without_what_its_replays_need_ling_is_left_alone(run: Run, release: str, missing: str) -> None:
    found = run(release, "admission", BAILING, **ON, **{flag_of(missing): "off"})
    assert "captured nothing" in found["captured"] and not found["with breaks"]
    assert f"without {missing} latent attention" in found["said"][0] and REFUSED in found["said"][-1]


def test_mutants_are_noticed(run: Run) -> None:
    found = run(ONE, "mutants", LFM2, **ON)
    assert [name for name in MUTANTS if not found[name]] == ["none"], found


@pytest.mark.parametrize(
    ("release", "architecture"),
    [*((release, GRANITE) for release in (ONE, NEWEST)), *((release, NEMOTRON) for release in ("0.5.19", NEWEST))],
)
def test_the_kernel_takes_mamba2_mixers_into_the_graph(run: Run, release: str, architecture: str) -> None:
    kernel = {KERNEL.flag: "reference", "SGLANG_MAMBA_CONV_DTYPE": "float16"}
    found = run(release, "with_kernel", architecture, **ON, **kernel)
    attention = LAYERS[architecture].count("attention")
    assert set(found["breaks"].values()) == {attention} and found["left"] == {}
    for script in found["scripts"]:
        for what, limit in test_mamba2_extend.LIMITS.items():
            assert script.get(what, 0.0) <= limit, script
        assert script["nobody's"] and max(script["replays"]) == attention + 1


@pytest.mark.parametrize("architecture", [GRANITE, LFM2, NEMOTRON])
def test_the_self_check_calls_it_right(release_root: Root, tmp_path: pathlib.Path, architecture: str) -> None:
    config = {**architectures.CONFIGURATIONS[architecture].config, "architectures": [architecture]}
    changes = overrides_of(architecture)
    if architecture == NEMOTRON:
        # experts need a GPU
        changes["hybrid_override_pattern"] = changes["hybrid_override_pattern"].replace("E", "-")
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    found, log = processes.beside(
        release_root(NEWEST),
        *("-m", "tests.releases.selfcheck_run", str(tmp_path)),
        environment={**ON, "SGLANG_BCG_SELFCHECK": "strict"},
    )
    assert found["selfcheck"]["verdict"] == "right" and found["refused"] is None and found["touched"] == [], found
    assert found["prefills"] == [{"equal": True, "replays": breaks_of(architecture) + 1}]
    assert "bcg-fixes self-check: right: 7 of 7 compared" in log


@pytest.mark.parametrize("release", ["0.5.18", "0.5.19", NEWEST])
def test_it_concerns_nemotron_where_its_layers_are_counted(release_root: Root, release: str) -> None:
    source = Source(Folder(release_root(release)))

    def concerned(*named: str, **config: Any) -> bool:
        launch = Launch(source, {"architectures": [*named], **config}, {})
        return any(concern.touches(launch) for concern in FIX.concerns)

    for name in feed_forward.NEMOTRON_NAMES:
        assert concerned(name) is concerned(name, **{feed_forward.PATTERN: "M-M*"}) is (release in COUNTING)
        assert concerned(name, **{feed_forward.PATTERN: "ME*"}) is (release in COUNTING)
        assert not concerned(name, **{feed_forward.PATTERN: "M*M"})
    assert concerned(GRANITE) and not concerned("NemotronForCausalLM")
    assert concerned(BAILING, kv_lora_rank=512) and not concerned(BAILING)


SETUP = "sglang/srt/model_executor/model_runner_components/"
DRIFTED = {
    "the convolution does something new": (
        *(NEWEST, "sglang/srt/models/lfm2.py"),
        *("output, _ = self.out_proj(C_gate * conv_out)", "output = self.out_proj(C_gate * conv_out)[0]"),
    ),
    "the mixer is called in another way": (
        *("0.5.20", "sglang/srt/models/granitemoehybrid.py"),
        *("attn_backend.linear_attn_backend.forward(", "attn_backend.linear_attn_backend.run("),
    ),
    "layers are found by other names": (
        *(NEWEST, f"{SETUP}layer_setup.py"),
        *('hasattr(layer, "linear_attn")', 'hasattr(layer, "linear_attention")'),
    ),
    "mixers are found": (
        *(NEWEST, f"{SETUP}layer_setup.py"),
        *('hasattr(layer, "attention")', 'hasattr(layer, "conv")'),
    ),
    "layers are counted otherwise": (
        *("0.5.15.post1", "sglang/srt/model_executor/model_runner.py"),
        *("len(self.attention_layers) < self.model_config.num_hidden_layers", "not self.attention_layers"),
    ),
    "feed-forward layers look at the batch": (
        *(NEWEST, "sglang/srt/models/nemotron_h.py"),
        *("        x = self.act_fn(x)\n", "        x = self.act_fn(x) * get_forward().scale\n"),
    ),
    "experts do something new": (
        *("0.5.20", "sglang/srt/models/nemotron_h.py"),
        *("return self._forward_core_normal(hidden_states)", "return self._forward_core_other(hidden_states)"),
    ),
    "NemotronH breaks nothing": (
        *(NEWEST, "sglang/srt/models/nemotron_h.py"),
        *("breakable_nemotron_mamba2_with_output = eager_on_graph(True)(", "breakable_nemotron_mamba2_with_output = ("),
    ),
    "latent attention is found by another name": (
        *(NEWEST, f"{SETUP}layer_setup.py"),
        *('hasattr(layer.self_attn, "attn_mqa")', 'hasattr(layer.self_attn, "attn_absorbed")'),
    ),
    "Bailing does something new": (
        *("0.5.17", "sglang/srt/models/bailing_moe_linear.py"),
        *("hidden = self.attn(q, k, v, forward_batch)", "hidden = self.attn(q, k, v + 1, forward_batch)"),
    ),
    "latent attention chooses in another way": (
        *("0.5.20", "sglang/srt/models/deepseek_common/attention_backend_handler.py"),
        *('backend_name in ["flashinfer", "flashmla"]', 'backend_name in ["flashinfer"]'),
    ),
    "layers are numbered otherwise": (NEWEST, f"{SETUP}cuda_graph_setup.py", "if layer_id < 0:", "if layer_id < 1:"),
}


@pytest.mark.parametrize("drift", DRIFTED)
def test_a_drifted_source_is_unknown(release_root: Root, drift: str) -> None:
    release, *change = DRIFTED[drift]
    finding = plan.ask(FIX, Source(rewritten(release_root(release), *change)))
    assert finding.verdict is Verdict.UNKNOWN, finding


# in parts


def runner(model: Any = None, **changed: Any) -> Any:
    plain = {
        "is_draft_worker": False,
        "spec_algorithm": types.SimpleNamespace(is_none=lambda: True),
        "server_args": types.SimpleNamespace(enable_breakable_cuda_graph=True),
        "attn_backend": None,
        "model": model,
        "device": "cpu",
    }
    return types.SimpleNamespace(**{**plain, **changed})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"is_draft_worker": True}, "speculation"),
        ({"spec_algorithm": types.SimpleNamespace(is_none=lambda: False)}, "speculation"),
        *(
            ({"server_args": types.SimpleNamespace(**{option: value})}, reason)
            for option, value, reason in (
                ("enable_lora", True, "LoRA"),
                ("lora_paths", ["a"], "LoRA"),
                ("enable_dp_attention", True, "DP attention"),
                ("pp_size", 2, "pipeline stages"),
                ("attn_cp_size", 2, "context parallelism"),
                ("enable_two_batch_overlap", True, "two-batch overlap"),
                ("enable_hierarchical_cache", True, "states that are loaded layer by layer"),
                ("enable_deterministic_inference", True, "deterministic inference"),
            )
        ),
    ],
)
def test_what_nobody_has_tried_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], reason: str
) -> None:
    # as in a release that has its options in server_args
    monkeypatch.setattr(ranks, "runtime_context", lambda: None)
    assert list(refusals.why_not(runner(**changed), ())) == [reason]
    assert list(refusals.why_not(runner(), ())) == []


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, hidden_states: torch.Tensor, batch: Any) -> torch.Tensor:
        return hidden_states


class Backend:
    """Runs Granite's mixers."""

    def forward(self) -> None:
        """It is not called."""


class Layer(torch.nn.Module):
    def __init__(self, **parts: torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def model_of(*layers: Layer, name: str = LFM2, module: str = short_convolutions.LFM2) -> Any:
    kind = type(name, (torch.nn.Module,), {"__module__": module})
    model = kind()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(layers)
    return model


def shown(model: Any, **changed: Any) -> list[bool]:
    with mixers.mixers_shown(runner(model, **changed)):
        return [hasattr(layer, mixers.KNOWN_NAME) for layer in model.model.layers]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "runtime_context", lambda: None)
    breaks = {Convolution.forward: {refusals.ID}, Backend.forward: {mixers.SSM_BREAK}}
    monkeypatch.setattr(wrappers, "fixes_in", lambda call: breaks.get(call, set()))


@pytest.mark.usefixtures("broken")
def test_only_layers_with_a_mixer_show_one_and_no_part_is_added() -> None:
    model = model_of(Layer(conv=Convolution()), Layer(self_attn=torch.nn.Identity()))
    weights, layer = list(model.state_dict()), model.model.layers[0]
    assert shown(model) == [True, False]
    with mixers.mixers_shown(runner(model)):
        assert layer.linear_attn is layer.conv
        assert list(model.state_dict()) == weights
    assert not hasattr(layer, mixers.KNOWN_NAME)


@pytest.mark.usefixtures("broken")
def test_other_models_and_other_kinds_of_graphs_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer(conv=Convolution())
    assert shown(model_of(layer, name="Lfm2VlForConditionalGeneration")) == [False]
    assert shown(model_of(layer, module="of.another.package")) == [False]
    without_breaks = types.SimpleNamespace(enable_breakable_cuda_graph=False)
    assert shown(model_of(layer), server_args=without_breaks) == [False]
    assert caplog.messages == []


@pytest.mark.usefixtures("broken")
def test_a_mixer_without_a_break_and_one_of_attention_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert shown(model_of(Layer(conv=Convolution()), Layer(conv=torch.nn.Identity()))) == [False, False]
    (said,) = caplog.messages
    assert "a mixer would not break the graph" in said
    caplog.clear()
    # SGLang admits it by itself
    of_attention = model_of(Layer(self_attn=torch.nn.Identity()), name=GRANITE, module=mixers.GRANITE)
    assert shown(of_attention) == [False] and caplog.messages == []


def settings_of_graphs(**changed: Any) -> Any:
    return types.SimpleNamespace(**{"bs": [256, 4096, 5120], "max_context_size": None, **changed})


def graphs_are_set(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Have SGLang's settings be these, and all mixers inside the graph."""
    for module in (measured, mixers):
        monkeypatch.setattr(module, "prefill_settings", lambda: settings)
    monkeypatch.setattr(mixers, "why_not_inside", lambda *given: iter(()))


def granite() -> Any:
    return model_of(Layer(mamba=torch.nn.Identity()), name=GRANITE, module=mixers.GRANITE)


def as_measured(**changed: Any) -> dict[str, Any]:
    plain = {"enable_breakable_cuda_graph": True, "tp_size": 1, "enable_memory_saver": False, "forward_hooks": None}
    unquantized = types.SimpleNamespace(quantization=None)
    backend = types.SimpleNamespace(linear_attn_backend=Backend())
    arguments = types.SimpleNamespace(**{**plain, **changed})
    return {"server_args": arguments, "model_config": unquantized, "attn_backend": backend}


@pytest.mark.usefixtures("broken")
def test_by_default_large_sizes_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little gain of a long prompt is less than its padding takes."""
    model, settings = granite(), settings_of_graphs()
    graphs_are_set(monkeypatch, settings)
    with mixers.mixers_shown(runner(model, **as_measured()), if_measured=True):
        assert settings.bs == [256, 4096] and hasattr(model.model.layers[0], mixers.KNOWN_NAME)
    assert settings.bs == [256, 4096, 5120]
    with mixers.mixers_shown(runner(model, **as_measured())):
        assert settings.bs == [256, 4096, 5120] and hasattr(model.model.layers[0], mixers.KNOWN_NAME)


@pytest.mark.usefixtures("broken")
def test_by_default_lfm2_is_left_alone_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglang_bcg_fixes")
    graphs_are_set(monkeypatch, settings_of_graphs())
    model = model_of(Layer(conv=Convolution()))
    with mixers.mixers_shown(runner(model, **as_measured()), if_measured=True):
        assert not hasattr(model.model.layers[0], mixers.KNOWN_NAME)
    assert caplog.messages == []


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("arguments", "graphs", "quantization", "reason"),
    [
        ({"tp_size": 2}, {}, None, "tensor parallelism"),
        ({"enable_memory_saver": True}, {}, None, "a memory saver"),
        ({"forward_hooks": [{"hook": "a"}]}, {}, None, "hooks of layers"),
        ({}, {"max_context_size": 4096}, None, "graphs of a largest context"),
        ({}, {"bs": [5120]}, None, "no small size to capture"),
        ({}, {"bs": None}, None, "no small size to capture"),
        ({}, {}, "fp8", "quantization"),
    ],
)
def test_by_default_what_nobody_has_measured_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    graphs: dict[str, Any],
    quantization: str | None,
    reason: str,
) -> None:
    caplog.set_level("INFO", "sglang_bcg_fixes")
    graphs_are_set(monkeypatch, settings_of_graphs(**graphs))
    asked = as_measured(**arguments)
    asked["model_config"].quantization = quantization
    model = granite()
    with mixers.mixers_shown(runner(model, **asked), if_measured=True):
        assert not hasattr(model.model.layers[0], mixers.KNOWN_NAME)
    (said,) = caplog.records
    assert f"as in SGLang: {reason}, which nobody has measured" in said.getMessage()
    assert said.levelno == logging.INFO


@pytest.mark.parametrize(
    ("device", "gigabytes", "reasons"),
    [("cuda", 3.9, ["less than 4 GiB of GPU memory are free"]), ("cuda", 4.0, []), ("cpu", 0.0, [])],
)
def test_a_full_gpu_starts_without_graphs_as_in_sglang(
    monkeypatch: pytest.MonkeyPatch, device: str, gigabytes: float, reasons: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(gigabytes * 2**30), 80 << 30))
    assert [*measured.why_no_room(types.SimpleNamespace(device=device))] == reasons


def attention(**parts: torch.nn.Module) -> Layer:
    return Layer(attention=Layer(**parts))


class ByHeads(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def latent_shown(model: Any, **changed: Any) -> list[bool]:
    with latent.latent_attention_shown(runner(model, **{"prefill_attention_backend_str": "fa3", **changed})):
        return [hasattr(layer, latent.LATENT_NAME) for layer in model.model.layers]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose handlers choose what they can capture."""
    monkeypatch.setattr(ranks, "runtime_context", lambda: None)
    monkeypatch.setattr(latent_attention, "is_chosen_by", lambda fix_id: True)


@pytest.mark.usefixtures("chosen")
def test_lings_attention_is_shown_and_heads_are_joined_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    linear: Any = attention(attn=ByHeads())
    layers = linear, attention(attn_mqa=torch.nn.Identity())
    model = model_of(*layers, name=BAILING, module=latent.BAILING)
    weights, rows = list(model.state_dict()), torch.ones(3, 2, 4)
    with latent.latent_attention_shown(runner(model, prefill_attention_backend_str="fa3")):
        assert all(layer.self_attn is layer.attention for layer in layers)
        assert linear.attention.attn(rows).shape == (3, 8) and list(model.state_dict()) == weights
    assert not hasattr(linear, latent.LATENT_NAME) and linear.attention.attn(rows).shape == rows.shape
    assert caplog.messages == []


@pytest.mark.usefixtures("chosen")
def test_ling_of_another_kind_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    layers = attention(attn=ByHeads()), attention(attn_mqa=torch.nn.Identity())
    assert latent_shown(model_of(*layers, name="BailingMoeV3ForCausalLM", module=latent.BAILING)) == [False, False]
    assert latent_shown(model_of(*layers, name=BAILING, module="of.another.package")) == [False, False]
    ling = model_of(*layers, name=BAILING, module=latent.BAILING)
    without_breaks = types.SimpleNamespace(enable_breakable_cuda_graph=False)
    assert latent_shown(ling, server_args=without_breaks) == [False, False]
    # SGLang admits grouped queries by itself
    assert latent_shown(model_of(layers[0], name=BAILING, module=latent.BAILING)) == [False]
    assert caplog.messages == []
    assert latent_shown(ling, prefill_attention_backend_str="triton") == [False, False]
    (said,) = caplog.messages
    assert "latent attention on triton, which nobody has tried" in said


class FeedForward(Layer):
    """A layer with nothing to break."""


MIXED = (Layer(), FeedForward(), Layer())


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The module of a release that wants attention or a mixer in each layer."""

    def count(*, attention_layer_count: int, start_layer: int, end_layer: int) -> bool:
        return attention_layer_count >= end_layer - start_layer

    setup = types.SimpleNamespace(**{feed_forward.COUNT: count})
    modules = {
        SETUP_MODULE: setup,
        feed_forward.NEMOTRON: types.SimpleNamespace(**{feed_forward.FEED_FORWARD: FeedForward}),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ranks, "runtime_context", lambda: None)
    return setup


def is_admitted(
    setup: Any,
    *layers: Layer,
    found: int = 2,
    name: str = NEMOTRON,
    module: str = feed_forward.NEMOTRON,
    **changed: Any,
) -> bool:
    """Ask as SGLang does, which has found attention or a mixer in so many of the layers."""
    count = getattr(setup, feed_forward.COUNT)
    with feed_forward.feed_forward_counted(runner(model_of(*layers, name=name, module=module), **changed)):
        answer: bool = getattr(setup, feed_forward.COUNT)(
            attention_layer_count=found, start_layer=0, end_layer=len(layers)
        )
    assert getattr(setup, feed_forward.COUNT) is count
    return answer


@pytest.mark.parametrize("name", feed_forward.NEMOTRON_NAMES)
def test_a_feed_forward_layer_counts_as_one(setup: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert is_admitted(setup, *MIXED, name=name)
    assert not is_admitted(setup, *MIXED, found=1, name=name)
    assert not is_admitted(setup, Layer(), Layer(), Layer(), name=name)
    assert caplog.messages == []


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "NemotronHForCausalLMMTP", "module": f"{feed_forward.NEMOTRON}_mtp"},
        {"name": "NemotronH_Nano_VL_V2", "module": "sglang.srt.models.nano_nemotron_vl"},
        {"module": "of.another.package"},
        {"server_args": types.SimpleNamespace(enable_breakable_cuda_graph=False)},
    ],
    ids=["its draft", "with images", "of another package", "without breaks"],
)
def test_the_count_of_others_is_left_alone(
    setup: Any, caplog: pytest.LogCaptureFixture, changed: dict[str, Any]
) -> None:
    assert not is_admitted(setup, *MIXED, **changed)
    assert caplog.messages == []


def test_nemotron_as_a_draft_is_refused_aloud_and_what_sglang_admits_is_left_to_it(
    setup: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_admitted(setup, *MIXED, found=3, is_draft_worker=True) and caplog.messages == []
    assert not is_admitted(setup, *MIXED, is_draft_worker=True)
    (said,) = caplog.messages
    assert "speculation" in said


def test_a_release_that_does_not_count_layers_is_left_alone(setup: Any) -> None:
    delattr(setup, feed_forward.COUNT)
    with feed_forward.feed_forward_counted(runner(model_of(*MIXED, name=NEMOTRON, module=feed_forward.NEMOTRON))):
        assert vars(setup) == {}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> breaks.Replays:
    mixers.as_break.cache_clear()
    return breaks.kept(monkeypatch)


def test_a_replay_takes_its_own_batch_and_zeroes_what_is_behind(
    captured: breaks.Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole bucket of five at capture, three real tokens at replay, whose two last rows are left over."""
    batches = [types.SimpleNamespace(extend_num_tokens=real) for real in (5, 3)]
    seen = []

    def original(mixer: Any, hidden_states: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.append((mixer, len(hidden_states), batch))
        return hidden_states + 7

    for module in (forward_batch, mixers):
        monkeypatch.setattr(module, "prefill_batch", lambda: batches[0])
    hidden = torch.arange(10.0).view(5, 2)
    output = mixers.break_round_the_convolution(original, "mixer", hidden, "the batch of the capture")
    assert torch.equal(output, hidden + 7)
    first = batches.pop(0)
    hidden.mul_(2)
    hidden[3:] = torch.nan
    captured[0]()
    assert torch.equal(output[:3], hidden[:3] + 7) and (output[3:] == 0).all()
    assert seen == [("mixer", 5, first), ("mixer", 3, batches[0])]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("what", ["warm-up", "decode"])
def test_everything_else_is_the_original(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: what != "warm-up")
    monkeypatch.setattr(forward_batch, "prefill_batch", lambda: None if what == "decode" else object())
    rows = torch.ones(5, 2)
    given = mixers.break_round_the_convolution(lambda *given: given, "mixer", rows, "theirs")  # type: ignore[arg-type]
    assert given == ("mixer", rows, "theirs")
