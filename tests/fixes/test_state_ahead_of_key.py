# SPDX-License-Identifier: Apache-2.0
"""Keys that are cut back when a request ends, on a real scheduler and its prefix tree: red, green, right releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_bcg_fixes.fixes import state_ahead_of_key as fix
from sglang_bcg_fixes.source.finding import Verdict
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "state_ahead_of_key"
PROMPT, BEYOND = 100, 3
FALCON_H1 = {"attention_backend": "triton", "model": {"mamba_chunk_size": 16}, "mamba_track_interval": 16}
# in float32 the kernels refuse to run
QWEN3_NEXT = {"attention_backend": "triton", "dtype": "float16"}
NO_BUFFER = dict.fromkeys(("mamba_scheduler_strategy", "mamba_radix_cache_strategy"), "no_buffer")
# the second answer passes a checkpoint
TOKENS = (8, 30)
# the assertion is that of the tree that was the default
ENDING = ("0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1")
WRONG = ("0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21")
RESULTS = "sglang/srt/managers/scheduler_components/batch_result_processor.py"


def run(release: str, ends: str, model: str = "falcon_h1", **server: Any) -> Any:
    model_arguments = QWEN3_NEXT if model == "qwen3next" else FALCON_H1
    asked = {**model_arguments, "ends": ends, "tokens": TOKENS, "strip_thinking_cache": ends == "thinking", **server}
    return alone.found(FIX, release, "tests.scenarios.shortened_keys", model, json.dumps(asked))


@pytest.mark.parametrize("release", ENDING)
def test_the_server_goes_on_and_keeps_the_checkpoint_of_the_prompt(release: str) -> None:
    found = run(release, "thinking")
    assert found["applied"] == [FIX] and found["with"] == [[96, True], [96, True]]
    short, long = found["without"]
    assert short == [96, True] and "It is required cache_len=128, page_aligned_len=100" in long


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_the_first_releases_have_such_checkpoints_of_one_family(release: str) -> None:
    found = run(release, "thinking", "qwen3next")
    assert found["applied"] == [FIX] and found["with"] == [[64, True], [64, True]]
    assert "It is required cache_len=128, page_aligned_len=100" in found["without"][1]


@pytest.mark.parametrize("release", WRONG)
def test_a_later_state_does_not_pass_for_that_of_the_prompt(release: str) -> None:
    found = run(release, "thinking")
    assert found["applied"] == [FIX] and found["with"] == [[96, True], [96, True]]
    assert found["without"] == [[96, True], [PROMPT, False]]


def test_a_state_after_a_stop_does_not_pass_for_that_of_the_stop() -> None:
    found = run("0.5.22", "stop", **NO_BUFFER)
    assert found["applied"] == [FIX] and found["with"] == [[PROMPT, True], [PROMPT, True]]
    assert found["without"] == [[PROMPT + tokens - BEYOND, False] for tokens in TOKENS]


@pytest.mark.parametrize("release", ["0.5.14", "0.5.17", "0.5.20", "0.5.22"])
def test_a_state_after_a_grammar_does_not_pass_for_that_of_its_end(release: str) -> None:
    # SGLang asserts that nothing is cut off where nothing speculates, but not with that flag
    # the newest token is not computed yet
    found = run(release, "grammar", **NO_BUFFER, strip_thinking_cache=True)
    assert found["applied"] == [FIX] and found["with"] == [[PROMPT, True], [PROMPT, True]]
    assert found["without"] == [[PROMPT + tokens - BEYOND - 1, False] for tokens in TOKENS]


@pytest.mark.parametrize(
    ("release", "without"),
    [*((release, [112, False]) for release in ("0.5.14", "0.5.17", "0.5.21")), ("0.5.22", [112, True])],
)
def test_a_checkpoint_is_not_counted_twice_at_the_end_of_a_grammar(release: str, without: list[Any]) -> None:
    # of the last four tokens one is kept, and the checkpoint lies among the three before them; there are two slots
    overlapped: dict[str, Any] = {"strip_thinking_cache": True, "disable_overlap_schedule": False}
    found = run(release, "grammar", tokens=[18], **overlapped)
    assert found["applied"] == [FIX] and found["without"] == [without]
    assert found["with"] == [[96, True] if without == [112, False] else without]


# with no_buffer a prompt keeps the state that it has been cached with, and a key is not cut at a stop yet
@pytest.mark.parametrize(("release", "ends"), [("0.5.13", "thinking"), ("0.5.21", "thinking"), ("0.5.21", "stop")])
def test_live_states_of_earlier_releases_are_right_and_stay(release: str, ends: str) -> None:
    found = run(release, ends, **NO_BUFFER)
    assert found["applied"] == [FIX] and found["with"] == found["without"] == [[PROMPT, True], [PROMPT, True]]


@pytest.mark.parametrize(("ends", "strategy"), [("thinking", {}), ("thinking", NO_BUFFER), ("stop", NO_BUFFER)])
def test_the_newest_release_is_left_as_it_is(ends: str, strategy: dict[str, str]) -> None:
    found = run(NEWEST, ends, **strategy)
    assert found == {"applied": [], "without": [[PROMPT if strategy else 96, True]] * 2}


@pytest.mark.parametrize("body", [fix.keep_checkpoint_out, fix.keep_live_state_out])
@pytest.mark.parametrize(
    ("ended", "hybrid", "extra_buffer", "key", "skips"),
    [
        (True, True, True, 5, [True, False]),
        (True, True, False, 5, [False, True]),
        # a state that the key reaches
        (True, True, True, 8, [False, False]),
        (True, True, False, 8, [False, False]),
        # it is retracted, and comes back
        (False, True, True, 5, [False, False]),
        (False, True, False, 5, [False, False]),
        # a prefix cache without states
        (True, False, True, 5, [False, False]),
        (True, False, False, 5, [False, False]),
    ],
)
def test_only_an_ended_request_with_such_a_state_is_kept_out(
    body: Callable[..., None], ended: bool, hybrid: bool, extra_buffer: bool, key: int, skips: list[bool]
) -> None:
    kv = SimpleNamespace(kv_committed_len=8, mamba_last_track_seqlen=8)
    request: Any = SimpleNamespace(
        kv=kv, finished=lambda: ended, owned_kv_len=lambda: key, skip_radix_cache_insert=False
    )
    pool = SimpleNamespace(enable_mamba_extra_buffer=extra_buffer)
    body(request, SimpleNamespace(supports_mamba=lambda: hybrid, req_to_token_pool=pool))
    assert request.skip_radix_cache_insert is skips[body is fix.keep_live_state_out]


@pytest.mark.parametrize(
    ("retained", "tokens", "hybrid", "extra_buffer", "skips"),
    [
        ([1], [1, 2, 3], True, False, [True, True]),
        ([1, 2, 3], [1, 2, 3], True, False, [False, False]),
        ([1], 1, True, False, [False, False]),
        ([1], [1, 2, 3], True, True, [True, False]),
        ([1, 2, 3], [1, 2, 3], True, True, [False, False]),
        ([1], [1, 2, 3], False, False, [False, False]),
    ],
)
@pytest.mark.parametrize("body", [fix.keep_cut_run_out, fix.keep_cut_live_state_out])
def test_only_what_a_grammar_has_cut_is_kept_out(
    body: Callable[..., list[int]],
    retained: list[int],
    tokens: list[int] | int,
    hybrid: bool,
    extra_buffer: bool,
    skips: list[bool],
) -> None:
    # as in SGLang, whose other pools do not have it
    pool = SimpleNamespace(enable_mamba_extra_buffer=extra_buffer) if hybrid else SimpleNamespace()
    processor = SimpleNamespace(tree_cache=SimpleNamespace(supports_mamba=lambda: hybrid, req_to_token_pool=pool))
    request = SimpleNamespace(skip_radix_cache_insert=False)
    assert body(retained, processor, request, tokens) is retained
    assert request.skip_radix_cache_insert is skips[body is fix.keep_cut_live_state_out]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("if req.owned_kv_len() != req.kv.kv_committed_len:", "if req.owned_kv_len() != 0:", Verdict.UNKNOWN),
        ("def _mamba_can_cache_finished_req(", "def _mamba_may_cache_finished_req(", Verdict.AFFECTED),
    ],
)
def test_a_later_source_is_read_and_not_guessed(old: str, new: str, verdict: Verdict) -> None:
    assert alone.verdict(FIX, NEWEST, RESULTS, old, new) is verdict
