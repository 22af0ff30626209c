# SPDX-License-Identifier: Apache-2.0
"""Batches that a prefill graph would answer wrongly run without it, and those that it serves rightly keep it."""

from __future__ import annotations

import types
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import mamba_tracking_dropped
from tests.fixes import alone
from tests.wheels import NEWEST

KINDS = (
    "by keyword, text",
    "by keyword, image",
    "between, text",
    "between, image",
    "M-RoPE, text",
    "M-RoPE, image",
    "deepstack, text",
    "deepstack, image",
    "routers, text",
    "routers, image",
    "experts, text",
    "experts, image",
)
IMAGES = KINDS[1::2]
ERROR = "RuntimeError('Boolean value of Tensor with more than one value is ambiguous')"
# what each graph loses, by how a multimodal model comes to its layers
LOST = {
    "0.5.11": IMAGES,
    "0.5.12.post1": IMAGES,
    "0.5.13.post1": (*KINDS[:2], *KINDS[4:]),
    "0.5.14": (*KINDS[5:9:2], "experts, image"),
    "0.5.15.post1": IMAGES,
    "0.5.21": KINDS[7::2],
    NEWEST: KINDS[7::2],
}
CHECKPOINTS = ("0.5.13.post1", "0.5.14", "0.5.17")
MAMBA2 = "Mamba2, checkpoint"
ILLEGAL = "InterpreterError(\"RuntimeError('CUDA error: an illegal memory access was encountered')\")"
# the batch before the capture had no adapter
STALE_ADAPTERS = {
    "with an adapter, freed memory is as it was": "wrong",
    "without, freed memory is as it was": "right",
    "with an adapter, freed memory is another's": ILLEGAL,
    "without, freed memory is another's": ILLEGAL,
}


def run(release: str, what: str, fix: str, flag: str) -> tuple[dict[str, Any], str]:
    """The findings, and the log."""
    return alone.logged(fix, release, "tests.releases.graph_admission", what, flag=flag)


@pytest.mark.parametrize("release", LOST)
def test_without_the_fix_a_replay_loses_the_embeddings(release: str) -> None:
    found, log = run(release, "images", "vlm_embeds_dropped", "off")
    lost = [ERROR, False] if release == "0.5.13.post1" else ["wrong", True]
    assert found == {kind: lost if kind in LOST[release] else ["right", True] for kind in KINDS}
    assert "bcg-fixes vlm_embeds_dropped:" not in log


@pytest.mark.parametrize("release", LOST)
def test_with_the_fix_only_what_would_be_lost_runs_without_a_graph(release: str) -> None:
    found, log = run(release, "images", "vlm_embeds_dropped", "on")
    assert found == {kind: ["right", kind not in LOST[release]] for kind in KINDS}
    # one for each thing that is lost
    warnings = 3 if release in ("0.5.14", "0.5.21", NEWEST) else 1
    assert log.count("bcg-fixes vlm_embeds_dropped: a prefill runs without its graph") == warnings
    assert "SGLANG_BCG_FIX_VLM_EMBEDS_DROPPED=off" in log


@pytest.mark.parametrize("release", LOST)
def test_ranks_decide_alike_where_one_has_images(release: str) -> None:
    found, _ = run(release, "ranks", "vlm_embeds_dropped", "on")
    # a rank that replays alone waits for the others without end
    for text, image in zip(KINDS[::2], KINDS[1::2], strict=True):
        together = not {text, image} & set(LOST[release])
        # not where other options give a batch the tokens of all ranks
        assert found[text] == [text not in LOST[release], together, text not in LOST[release]], text
        assert found[image] == [image not in LOST[release], together, image not in LOST[release]], image
    assert found.keys() == set(KINDS)


@pytest.mark.parametrize("flag", ["off", "on"])
@pytest.mark.parametrize("release", CHECKPOINTS)
def test_a_checkpoint_is_written_where_the_layers_ask_the_batch(release: str, flag: str) -> None:
    found, log = run(release, "checkpoints", "mamba_tracking_dropped", flag)
    # the mask does not come through a replay, and does in an eager run
    assert found.pop(MAMBA2) == ([True, False] if flag == "on" else [False, True])
    # only these releases have a way of carrying it
    assert found.pop("Mamba2, carried", None) == (None if release == "0.5.13.post1" else [True, True])
    assert set(map(tuple, found.values())) == {(False, True)}
    assert log.count("bcg-fixes mamba_tracking_dropped: a prefill") == (flag == "on")


@pytest.mark.parametrize(("release", "flag"), [("0.5.11", "on"), ("0.5.16", "off"), ("0.5.16", "on")])
def test_adapters_are_those_of_the_batch(release: str, flag: str) -> None:
    found, log = run(release, "adapters", "lora_batch_stale", flag)
    if flag == "off":
        assert found == {kind: [answer, True] for kind, answer in STALE_ADAPTERS.items()}
    else:
        assert found == {kind: ["right", False] for kind in STALE_ADAPTERS}
    assert log.count("bcg-fixes lora_batch_stale: with LoRA every prefill") == (flag == "on")


@pytest.mark.parametrize(("radix_cache", "wanted"), [(True, True), (False, False)])
@pytest.mark.parametrize("wrapper", ["primary", "prefill_backend", None])
def test_under_dp_attention_ranks_decide_by_what_they_have_in_common(
    radix_cache: bool, wanted: bool, wrapper: str | None
) -> None:
    inner = types.SimpleNamespace(linear_attn_backend=object())
    runner = types.SimpleNamespace(
        attn_backend=types.SimpleNamespace(**{wrapper: inner}) if wrapper else inner,
        server_args=types.SimpleNamespace(enable_mamba_extra_buffer=lambda: True, disable_radix_cache=not radix_cache),
    )
    batch = types.SimpleNamespace(global_num_tokens_cpu=[6, 0], mamba_track_mask=None)
    assert mamba_tracking_dropped.wants_checkpoint(runner, batch) is wanted
    batch.global_num_tokens_cpu = None
    assert mamba_tracking_dropped.wants_checkpoint(runner, batch) is False
