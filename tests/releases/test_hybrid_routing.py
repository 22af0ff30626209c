# SPDX-License-Identifier: Apache-2.0
"""Attention that each kind of layer is routed to by every release's real backend, without and with the fix."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import hybrid_layer_misrouted, layers_routed_by_id
from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes, wheels
from tests.mutated import rewritten
from tests.wheels import NEWEST, RELEASES

CONFIGURATION_IS_SHARED = RELEASES[: RELEASES.index("0.5.14")]
ONE_METHOD_IS_ASKED = RELEASES[RELEASES.index("0.5.13") :]
INKLING = RELEASES[RELEASES.index("0.5.17") :]
MINICPM = RELEASES[RELEASES.index("0.5.19") :]
# Bailing imports this in 0.5.15 and with it the CUDA-only package cutlass, unguarded
WITHOUT_CUTLASS = {"0.5.15": ["sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits"]}

# whose layer, what it is made of, its id, where it belongs; full attention is said to be at 1 and 3, in a draft at 0
TARGET_LAYERS = {
    "linear": ("linear", 0, "linear"),
    "linear, its id is in the list": ("linear", 1, "linear"),
    "Bailing's linear": ("bailing", 0, "linear"),
    "Bailing's linear, its id is in the list": ("bailing", 1, "linear"),
    "MiniCPM's linear": ("minicpm", 0, "linear"),
    "MiniCPM's linear, its id is in the list": ("minicpm", 1, "linear"),
    "linear of a model outside of SGLang": ("plain", 0, "linear"),
    "linear of a model outside of SGLang, beyond the last": ("plain", 99, "linear"),
    "full": ("plain", 1, "full"),
    "full, of a class of its own": ("derived", 3, "full"),
}
DRAFT_LAYERS = {
    "a draft's full": ("plain", 0, "full"),
    "a draft's full, not the first": ("plain", 2, "full"),
    "a draft's full, of a class of its own": ("derived", 2, "full"),
    "a draft's linear": ("linear", 0, "linear"),
    "a draft's linear, not the first": ("linear", 1, "linear"),
    "a draft's, Bailing's linear": ("bailing", 0, "linear"),
}
LAYERS = TARGET_LAYERS | DRAFT_LAYERS
MISROUTED_BY_ID = {
    "linear, its id is in the list",
    "Bailing's linear, its id is in the list",
    "MiniCPM's linear, its id is in the list",
    "a draft's full, not the first",
    "a draft's full, of a class of its own",
    "a draft's linear",
    "a draft's, Bailing's linear",
}
# how builds between 0.5.12.post1 and 0.5.13 decided, in our own words, and what each got wrong
BY_KIND = """
        if layer is not None:
            if isinstance(layer, RadixLinearAttention):
                return False
            if isinstance(layer, RadixAttention):
                return True
        return layer_id in self.full_attn_layers
"""
BY_MARK = BY_KIND.replace("Attention):", f"Attention) or getattr(layer, {layers_routed_by_id.MARK!r}, False):", 1)
FOREIGN = {name for name in LAYERS if "outside" in name}
MARKED = {name for name in LAYERS if "Bailing's" in name or "MiniCPM's" in name}
MISROUTED = {BY_KIND: FOREIGN | MARKED, BY_MARK: FOREIGN}
# guards that are wrong, and what shows it
NO_GUARDS = {
    "a target's RadixAttention is full": FOREIGN,
    "marks do not count": MISROUTED_BY_ID & MARKED,
    "the kind does not count": {"linear, its id is in the list", "a draft's linear"},
    "drafts do not count": {"a draft's full, not the first", "a draft's full, of a class of its own"},
}
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "torch_dtype": "float32",
    "text_config": SMALL
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "intermediate_size": 128,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "vision_config": {"model_type": "qwen3_5", "hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
}
NEMOTRON_H = SMALL | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E",
    "mtp_hybrid_override_pattern": "*E",
    "head_dim": 16,
    "intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
FULL_ATTENTION_AT = {"qwen3next": [1], "bailing_full": [1], "qwen3_5": [1], "nemotron_h": [2]}
# these drafts copy the configuration themselves from 0.5.13 on
CAREFUL = ("qwen3next", "qwen3_5")


def run(root: pathlib.Path, reports: pathlib.Path, fix: Fix, scenario: str, *arguments: str) -> dict[str, Any]:
    # the others are not looked at here, and this one must be there
    only = {"SGLANG_BCG_FIXES": "off", fix.flag: "on", "SGLANG_BCG_REPORT_DIR": str(reports)}
    found: dict[str, Any]
    found, _ = processes.beside(root, "-m", f"tests.scenarios.{scenario}", *arguments, timeout=600, environment=only)
    return found


def wrong(routes: dict[str, Any]) -> set[str]:
    return {name for name, route in routes.items() if route != LAYERS[name][2]}


@pytest.mark.parametrize("release", RELEASES)
def test_every_layer_goes_where_it_belongs(release: str, tmp_path: pathlib.Path) -> None:
    one_method = release in ONE_METHOD_IS_ASKED
    given = (
        TARGET_LAYERS,
        DRAFT_LAYERS,
        list(MISROUTED) if one_method else [],
        release in INKLING,
        WITHOUT_CUTLASS.get(release, []),
    )
    found = run(
        wheels.unpacked(release),
        tmp_path / "reports",
        declared_in(layers_routed_by_id),
        *("hybrid_routing", "routing", *map(json.dumps, given)),
    )
    there = {name for name in LAYERS if release in MINICPM or "MiniCPM" not in name}
    assert found["states"] == ["pending", "applied"] and found["early"] == []

    assert set(found["patched"]) == set(found["unpatched"]) == there
    assert wrong(found["patched"]) == set()
    assert wrong(found["unpatched"]) == MISROUTED_BY_ID & there
    assert set(found["marked"]) == MARKED & there
    assert {name: wrong(routes) for name, routes in found["no guards"].items()} == {
        name: rows & there for name, rows in NO_GUARDS.items()
    }

    # ids without a layer, layers without an id, and failures are the release's own business
    assert found["odd"] == found["odd unpatched"]
    assert found["odd"][:3] == ["full", "linear", "full"]
    assert [text.partition(":")[0] for text in found["odd"][3:5]] == [
        "AssertionError" if one_method else "KeyError",
        "AttributeError",
    ]
    assert found["odd"][5:] == ["failed"] * len(there & set(TARGET_LAYERS)) and found["lists kept"]

    places = ["_is_full_attn"] if one_method else ["forward", "forward_decode", "forward_extend"]
    assert found["wrapped"] == places and found["wrapped after undo"] == []
    assert found.get("inkling") == ([True, False, True, True] if release in INKLING else None)

    for (unpatched, patched), rows in zip(found["builds"], MISROUTED.values(), strict=one_method):
        assert wrong(unpatched) == rows & there and wrong(patched) == set()


@pytest.mark.parametrize("release", ["0.5.13", NEWEST])
@pytest.mark.parametrize("body", MISROUTED, ids=["by kind", "by mark"])
def test_a_build_between_releases_is_known(release: str, body: str) -> None:
    text = "return layer_id in self.full_attn_layers"
    file = layers_routed_by_id.MODULE.replace(".", "/") + ".py"
    finding = ask(declared_in(layers_routed_by_id), Source(rewritten(wheels.unpacked(release), file, text, body)))
    assert finding.verdict is Verdict.LATENT and "routed by kind" in finding.reason, finding


@pytest.mark.parametrize("release", CONFIGURATION_IS_SHARED)
def test_a_draft_leaves_its_targets_configuration_alone(release: str, tmp_path: pathlib.Path) -> None:
    models = processes.REPOSITORY / "cpu_sglang" / "models"
    folders = {name: models / name for name in ("qwen3next", "bailing_full")}
    for name, config in (("qwen3_5", QWEN3_5), ("nemotron_h", NEMOTRON_H)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
    pairs = [f"{name}={folder}" for name, folder in folders.items()]
    found = run(
        wheels.unpacked(release),
        tmp_path / "reports",
        declared_in(hybrid_layer_misrouted),
        *("draft_beside_target", "configuration", *pairs),
    )
    assert found["state"] == "applied"
    copied_by_the_draft = CAREFUL if release in ONE_METHOD_IS_ASKED else ()
    for name, ids in FULL_ATTENTION_AT.items():
        patched, unpatched = found["patched"][name], found["unpatched"][name]
        assert patched["before"] == patched["after"] == unpatched["before"] and patched["before"]["ids"] == ids
        assert patched["whole"] and patched["draft"] == unpatched["after"]["ids"]
        assert unpatched["after"]["architecture"] != unpatched["before"]["architecture"]
        assert unpatched["after"]["ids"] == (ids if name in copied_by_the_draft else [0]), name

    assert found["beside a draft"] == found["alone"] and found["alone"][0] == [1]
    if "qwen3next" in copied_by_the_draft:
        assert found["beside a draft, unpatched"] == found["alone"]
    else:
        assert found["beside a draft, unpatched"][0] == [0]
        assert found["beside a draft, unpatched"][1] != found["alone"][1]
