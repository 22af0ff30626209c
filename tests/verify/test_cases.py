# SPDX-License-Identifier: Apache-2.0
"""The cases as data: their names, their scripts, and their flags on every release."""

from __future__ import annotations

import pytest

from sglang_bcg_fixes.lab.verify import cases, models
from sglang_bcg_fixes.lab.verify.cases import BUCKETS, CASES, FEW_BUCKETS, Case
from sglang_bcg_fixes.planning import registry
from sglang_bcg_fixes.source.tree import Folder, Source
from tests import wheels
from tests.wheels import NEWEST, RELEASES

FIXES = {fix.id: fix for fix in registry.discover().fixes}
# the first release that has the model, or starts with these flags, or makes such graphs unasked
FIRST = {
    "falcon_h1_checkpoints": "0.5.13",
    "eagle3_windowed_draft": "0.5.12",
    "qwen3_next_stripped_thinking": "0.5.13",
    "llama_stripped_thinking_at_full_load": "0.5.13",
    "qwen3_5_text_prefill_graph": "0.5.17",
    "qwen3_5_text_by_default": "0.5.17",
    "qwen3_5_by_default": "0.5.16",
    "deepseek_unbroken_prefix": "0.5.16",
    "llama_4_unbroken_chunk": "0.5.16",
    "ling_host_memory": "0.5.16",
}
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_case_that_a_fix_names_is_declared() -> None:
    named = {name for fix in FIXES.values() for name in fix.verify}
    assert named <= {case.name for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


@by_name
def test_what_a_case_watches_for_has_no_fix_yet(case: Case) -> None:
    for defect in case.watches:
        assert not FIXES[defect].patches, f"name {case.name} in the `verify` of {defect}, which has a fix now"
    is_named = any(case.name in fix.verify for fix in FIXES.values())
    assert case.watches or is_named or case.inside or case.name == "llama_prefix_cache"


@by_name
def test_a_case_says_what_it_shows_of_a_model_that_can_be_made(case: Case) -> None:
    assert case.sentence.endswith(".") and "\n" not in case.sentence
    assert {case.model, case.draft or case.model} <= set(models.MODELS)


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_knows_every_flag(release: str) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    for case in CASES:
        is_there = RELEASES.index(release) >= RELEASES.index(FIRST.get(case.name, RELEASES[0]))
        assert case.applies_to(source) is is_there, f"{case.name} on {release}"
        if not is_there:
            continue
        for eager in (False, True):
            unknown = [name for name in case.flags(source, BUCKETS, eager) if not source.has_option(name)]
            assert not unknown, f"{case.name}: {unknown}"


@pytest.mark.parametrize("release", RELEASES)
def test_prefill_graphs_are_of_their_kind_and_of_these_sizes_or_off(release: str) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    for case in CASES:
        if case.by_default:
            continue
        if case.unbroken and not case.applies_to(source):
            continue
        on, off = case.flags(source, BUCKETS), case.flags(source, BUCKETS, eager=True)
        old = {"--enable-breakable-cuda-graph", "--enforce-piecewise-cuda-graph"} <= on.keys()
        new = on.get("--cuda-graph-backend-prefill") == ("full" if case.unbroken else "breakable")
        assert (old or new) is (case.phase == "prefill") and not (old and new)
        sizes = on.get("--piecewise-cuda-graph-tokens", on.get("--cuda-graph-bs-prefill", BUCKETS))
        assert sizes == BUCKETS == tuple(sorted(BUCKETS))
        assert off.get("--cuda-graph-backend-prefill") == "disabled" or off.get("--disable-piecewise-cuda-graph")


@pytest.mark.parametrize("release", RELEASES)
def test_attention_is_sglangs_choice_where_the_first_layer_has_no_key_and_value_cache(
    release: str,
) -> None:
    source = Source(Folder(wheels.unpacked(release)))
    chosen = {
        case.name
        for case in CASES
        if not case.by_default and case.flags(source, BUCKETS).get("--attention-backend") != "triton"
    }
    sglangs = {"granite_hybrid_prefill_graph", "lfm2_prefill_graph"}
    on_hopper = {case.name for case in CASES if case.inside or case.unbroken}
    assert chosen == {"ling_host_memory", *sglangs, *on_hopper}
    # each of them has the prefix cache that it was made for
    for name in sglangs:
        case = cases.named(name)
        assert case
        flags = case.flags(source, BUCKETS)
        assert flags["--max-mamba-cache-size"] and not {"--attention-backend", "--disable-radix-cache"} & flags.keys()


def test_by_default_only_sizes_are_given_and_only_eager_says_a_word_of_graphs() -> None:
    source = Source(Folder(wheels.unpacked(NEWEST)))
    mine = [case for case in CASES if case.by_default]
    assert [case.name for case in mine] == ["qwen3_5_text_by_default", "qwen3_5_by_default"]
    for case in mine:
        chosen = [
            name for name in case.flags(source, BUCKETS) if not name.startswith(("--max-", "--mem-", "--context-"))
        ]
        assert chosen == ["--skip-tokenizer-init"]
        more = set(case.flags(source, BUCKETS, eager=True).items()) - set(case.flags(source, BUCKETS).items())
        assert more == {("--cuda-graph-backend-prefill", "disabled")}
        prompts = [prompt for call in case.script(BUCKETS) for prompt in call.prompts]
        assert len(set(prompts)) == len(prompts), "asked again, the radix cache would answer"


@pytest.mark.parametrize("buckets", [BUCKETS, FEW_BUCKETS], ids=["all", "quick"])
def test_lengths_around_every_bucket_batches_to_sixteen_repeats_and_chunks(buckets: tuple[int, ...]) -> None:
    calls = cases.around_every_bucket(buckets)
    alone = [len(call.prompts[0]) for call in calls if len(call.prompts) == 1]
    assert {size + by for size in buckets for by in (-1, 0, 1)} | {1} <= set(alone)
    together = [call for call in calls if len(call.prompts) > 1]
    assert {2, 3, 16} <= {len(call.prompts) for call in together}
    assert all(sum(map(len, call.prompts)) <= max(buckets) for call in together), "more than one prefill batch"
    assert max(alone) > 2 * max(buckets), "three chunks"
    again = [call for call in calls if call.again is not None]
    assert all(calls[call.again or 0].prompts == call.prompts for call in again)
    order = [len(call.prompts[0]) for call in calls if call.part == "larger after smaller"]
    assert order == sorted(order) == list(buckets)


def test_prompts_are_the_same_in_every_process_and_in_the_vocabulary() -> None:
    for case in CASES:
        calls = case.script(BUCKETS)
        assert calls == case.script(BUCKETS)
        assert all(2 <= token < models.VOCABULARY for call in calls for prompt in call.prompts for token in prompt)


def test_the_small_cache_is_given_out_again_while_the_batchs_rows_are_stale() -> None:
    case = cases.named("gpt_oss_decode_padding")
    assert case
    for buckets in (BUCKETS, FEW_BUCKETS):
        calls = case.script(buckets)
        first, second = [number for number, call in enumerate(calls) if call.part == "four rows"]
        between = sum(len(call.prompts[0]) + call.new_tokens for call in calls[first + 1 : second])
        # 0.8 of the tokens, at most, are in the pool of the windows
        assert between > 0.8 * 512
        assert all(len(call.prompts[0]) + call.new_tokens < 128 for call in calls if len(call.prompts) == 1)


def test_warm_prefixes_begin_as_an_earlier_prompt() -> None:
    calls = cases.warm_prefixes(BUCKETS)
    for number, call in enumerate(calls):
        if "warm" in call.part:
            earlier = [prompt for before in calls[:number] for prompt in before.prompts]
            assert all(any(prompt[: len(old)] == old for old in earlier) for prompt in call.prompts)


@pytest.mark.parametrize("buckets", [BUCKETS, FEW_BUCKETS], ids=["all", "quick"])
def test_prefixes_are_longer_and_shorter_than_what_is_asked_behind_them(buckets: tuple[int, ...]) -> None:
    cold: dict[tuple[int, ...], int] = {}
    compared, chunks = set(), 0
    for call in cases.behind_prefixes(buckets):
        if "behind" not in call.part:
            # by chance, a cached prompt could begin as another does
            assert not {prompt[0] for prompt in cold} & {prompt[0] for prompt in call.prompts}
            cold |= {prompt: len(prompt) for prompt in call.prompts}
            chunks += any(len(prompt) > max(buckets) for prompt in call.prompts)
            continue
        for prompt in call.prompts:
            found = max(length for known, length in cold.items() if prompt[:length] == known)
            compared.add(found > len(prompt) - found)
        # the smallest graph takes all of them
        assert sum(map(len, call.prompts)) - len(call.prompts) * found >= buckets[0] // 2
    assert compared == {True, False} and chunks


@pytest.mark.parametrize("buckets", [BUCKETS, FEW_BUCKETS], ids=["all", "quick"])
def test_a_chunk_is_left_in_one_part_and_in_several(buckets: tuple[int, ...]) -> None:
    chunk = models.LOCAL_CHUNK
    for call in cases.within_and_beyond_a_chunk(buckets):
        longest = max(map(len, call.prompts))
        assert (longest > chunk) is ("beyond" in call.part or "several" in call.part)
        assert (longest > max(buckets)) is ("several" in call.part)
        # a bucket that is filled exactly must be replayed
        assert longest <= chunk or longest not in buckets


def test_nothing_is_left_on_the_gpu_when_a_prompt_is_asked_from_host_memory() -> None:
    calls = cases.from_host_memory(BUCKETS)
    asked = [number for number, call in enumerate(calls) if call.again is not None]
    for before, number in zip([calls[number].again or 0 for number in asked[:1]] + asked, asked, strict=False):
        others = calls[max(before, calls[number].again or 0) + 1 : number]
        assert all(call.part == "others" for call in others)
        assert sum(len(prompt) for call in others for prompt in call.prompts) > cases.FEW_SLOTS
    again = calls[asked[0]].again or 0
    assert calls[again].prompts == calls[again - 1].prompts


@pytest.mark.parametrize("buckets", [BUCKETS, FEW_BUCKETS], ids=["all", "quick"])
def test_thinking_passes_a_checkpoint_or_does_not_fit(buckets: tuple[int, ...]) -> None:
    turns = cases.turns_after_thinking(buckets)
    passed = set()
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        length = len(first.prompts[0])
        assert first.thinks and not second.thinks and second.prompts[0][:length] == first.prompts[0]
        passed.add((length + first.new_tokens) // 64 > length // 64)
    assert passed == {True, False}
    others, thinking, again = cases.others_after_thinking_at_full_load(buckets)[:3]
    room = cases.FULL - sum(map(len, thinking.prompts))
    assert thinking.thinks and 0 < room < len(thinking.prompts) * thinking.new_tokens
    assert sum(map(len, others.prompts)) + len(others.prompts) * others.new_tokens < cases.FULL
    assert again.again == 0 and again.prompts == others.prompts and not again.thinks
