# SPDX-License-Identifier: Apache-2.0
"""Real runners with full prefill graphs of local layers: prompts within their chunk, and beyond it."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "local_attention_captured"
BACKEND = "sglang/srt/layers/attention/flashattention_backend.py"
# of each way in which a release asks whether a batch may be replayed
RELEASES = ("0.5.15", "0.5.16", "0.5.17", "0.5.20", "0.5.22", NEWEST)
LATENT = ("0.5.15", "0.5.15.post1")
CAPTURING_LLAMA_4 = RELEASES[1:]
MODEL = "sglang/srt/models/mllama4.py"
OWNS = "self.language_model = Llama4ForCausalLM("
UNCHANGED = (MODEL, OWNS, OWNS)
REPLAYED, EAGER, WRONG = [1, True], [0, True], [1, False]
WITHIN = ("within", "of the chunk", "two of the chunk", "within behind a prefix")
BEYOND = ("beyond", "one of two beyond", "beyond behind a prefix")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_only_what_lies_within_the_chunk_is_replayed(release: str, flag: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.full_prefill", "chunks", flag=flag)
    assert found["applied"] == ([FIX] if flag == "on" else [])
    beyond = EAGER if flag == "on" else WRONG
    assert found["found"] == {**dict.fromkeys(WITHIN, REPLAYED), **dict.fromkeys(BEYOND, beyond)}


@pytest.mark.parametrize("release", CAPTURING_LLAMA_4)
@pytest.mark.parametrize("flag", ["on", "off"])
def test_nothing_is_replayed_where_local_layers_have_their_own_pool(release: str, flag: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.full_prefill", "chunks_in_their_own_pool", flag=flag)
    assert found["applied"] == ([FIX] if flag == "on" else [])
    assert found["found"] == dict.fromkeys((*WITHIN, *BEYOND), EAGER if flag == "on" else WRONG)


@pytest.mark.parametrize("release", CAPTURING_LLAMA_4)
def test_layers_with_a_window_are_replayed_from_their_own_pool(release: str) -> None:
    found = alone.found(FIX, release, "tests.scenarios.full_prefill", "windows_in_their_own_pool")
    assert found["found"] and set(map(tuple, found["found"].values())) == {tuple(REPLAYED)}


@pytest.mark.parametrize("release", LATENT)
def test_the_first_releases_capture_no_llama_4(release: str) -> None:
    """Latent, and no longer so where they take its layers for a language model's."""
    assert alone.verdict(FIX, release, *UNCHANGED) is Verdict.LATENT
    assert alone.verdict(FIX, release, MODEL, OWNS, f"self.model = {OWNS}") is Verdict.AFFECTED


def test_a_source_that_plans_for_local_layers_is_fixed() -> None:
    old = "m.max_seq_len_k = self.max_context_len"
    new = f"{old}; m.local_attn_metadata = self.local_attn_builder.build()"
    assert alone.verdict(FIX, NEWEST, BACKEND, old, new) is Verdict.FIXED
