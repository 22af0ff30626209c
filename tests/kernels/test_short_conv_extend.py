# SPDX-License-Identifier: Apache-2.0
"""The short convolution's extend: both forms against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks import random_steps, short_conv_extend
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from sglang_bcg_fixes.kernels.short_conv_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.short_conv_extend import triton as form
from sglang_bcg_fixes.model import Accepted, Rejected
from tests.kernels import covering, linear_extend_cases, mutants
from tests.kernels import short_conv_extend_cases as cases
from tests.kernels.linear_extend_cases import After, Surroundings, same_bits
from tests.kernels.linear_extend_cases import faults as faults_of
from tests.kernels.short_conv_extend_mutants import AROUND, CHUNK, EXACT, MUTANTS, TUNING, faults, step

# of results in bfloat16, which are rounded by as much
OF_BFLOAT16 = 0.004


def run(of: cases.Step, around: Surroundings = AROUND, chunk: int = CHUNK) -> After:
    return cases.Launched(of, TUNING, around, chunk).run()


STEPS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one token": ([1], {}),
    "around a chunk": ([15, 16, 17], {}),
    "several chunks": ([70, 31, 48], {}),
    "nobody": ([0, 0], {}),
    "some have nothing": ([0, 3, 0, 18, 0], {"fresh": [2]}),
    "without prefix": ([20, 2, 16, 1], {"fresh": [0, 1]}),
    "without a slot": ([20, 2, 16, 1], {"gone": [0, 2]}),
    "all without a slot": ([20, 2], {"gone": [0, 1]}),
    "shorter than the window": ([1, 1, 2, 1], {"fresh": [3]}),
    "with bias": ([19, 4], {"bias": True}),
    "weights in single precision": ([19, 4], {"of_weights": torch.float32}),
}


@pytest.mark.parametrize("name", STEPS)
def test_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    assert faults_of(drawn, run(drawn), CHUNK, EXACT) == []


@pytest.mark.parametrize("name", STEPS)
def test_the_stepwise_form_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    launched = cases.Launched(drawn, stepwise.Tuning(), AROUND, CHUNK, (stepwise, stepwise))
    assert faults_of(drawn, launched.run(), CHUNK, EXACT) == []


@pytest.mark.parametrize("name", STEPS)
def test_both_forms_have_the_same_bits(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, dtype=torch.bfloat16, **{**options, "of_weights": None})
    other = cases.Launched(drawn, stepwise.Tuning(), AROUND, CHUNK, (stepwise, stepwise)).run()
    assert linear_extend_cases.differences(run(drawn), other, drawn.tokens) == []


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(lengths: list[int], dtype: torch.dtype) -> None:
    drawn = step(lengths, dtype=dtype)
    assert faults_of(drawn, run(drawn, chunk=64), 64, EXACT if dtype is torch.float16 else OF_BFLOAT16) == []


@pytest.mark.parametrize(
    "shape", [Shape(16, 2), Shape(32, 3), Shape(48, 4), Shape(80, 5), Shape(128, 3), Shape(192, 3)], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_other_shapes_as_they_are_tuned(shape: Shape, bias: bool) -> None:
    drawn = cases.draw(shape, [18, 5, 1, 2], dtype=torch.float16, fresh=[1, 3], bias=bias)
    tuning = dataclasses.replace(form.tuning_for(shape), programs=5)
    assert faults_of(drawn, cases.Launched(drawn, tuning, AROUND).run(), tolerance=EXACT) == []


@pytest.mark.parametrize("sequences", [1, 64, serving.MOST_SEQUENCES])
def test_many_short_sequences(sequences: int) -> None:
    source = random.Random(sequences)
    lengths = [source.randint(1, 4) for _ in range(sequences)]
    drawn = cases.draw(
        Shape(16, 3), lengths, dtype=torch.float16, fresh=range(0, sequences, 3), gone=range(5, sequences, 100)
    )
    around = Surroundings(padding=3, max_sequences=serving.MOST_SEQUENCES)
    assert faults_of(drawn, run(drawn, around), CHUNK, EXACT) == []


def test_nothing_around_a_sequence_changes_its_bits() -> None:
    drawn = step([20, 7, 33, 1, 2], fresh=[1], dtype=torch.bfloat16)
    together = run(drawn)
    assert linear_extend_cases.differences(together, run(drawn, Surroundings()), drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    drawn = step([20, 18, 9])
    right, rows = run(drawn), drawn.rows(1)
    drawn.inputs[rows] = linear_extend_cases.NAN
    after = run(drawn)
    assert bool(after.output[rows].isnan().all()) and bool(after.conv[drawn.slots[1]].isnan().all())
    for number in (0, 2):
        slot = drawn.slots[number]
        assert same_bits(after.output[drawn.rows(number)], right.output[drawn.rows(number)])
        assert same_bits(after.conv[slot], right.conv[slot])


def test_one_launch_serves_batch_after_batch() -> None:
    """Buffers and launches as a graph keeps them, batches as a server has them, scratch as the last one left it."""
    for drawn, around in linear_extend_cases.batch_after_batch(step):
        assert faults_of(drawn, run(drawn, around), CHUNK, EXACT) == [], drawn.lengths


@pytest.mark.parametrize("cuts", [[16], [1], [1, 2, 3], [39]], ids=str)
def test_a_prompt_in_pieces_is_the_whole_prompt(cuts: list[int]) -> None:
    drawn = step([40])
    whole, slot, conv = run(drawn), drawn.slots[0], drawn.conv
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        piece = drawn.with_projections(drawn.inputs[start:end], lengths=[end - start], conv=conv)
        after = run(piece)
        assert same_bits(after.output[: end - start], whole.output[start:end])
        conv = after.conv
    assert same_bits(conv[slot], whole.conv[slot])


@pytest.mark.parametrize("of", [(form, metadata), (stepwise, stepwise)], ids=["triton", "reference"])
def test_an_output_that_does_not_fit_is_refused(of: tuple[Any, Any]) -> None:
    drawn = step([20])
    launched = cases.Launched(drawn, TUNING, Surroundings(), CHUNK, of)
    launched.fill()
    launched.tables.max_tokens = 19
    with pytest.raises(ValueError, match="an output of 20 rows, but the tables were made for 19 tokens"):
        launched.extend()


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_where_it_runs(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = form.ready(0)
    if runs:
        assert isinstance(answer, Accepted)
    else:
        assert isinstance(answer, Rejected) and f"sm_{capability[0]}{capability[1]}" in answer.reason


# of LFM2-350M, -700M, -1.2B and -8B-A1B, one of eight ranks: channels of a tile
PUBLISHED = {Shape(1024, 3): 64, Shape(1536, 3): 64, Shape(2048, 3): 64, Shape(192, 3): 64, Shape(48, 3): 16}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_tiles_of_published_shapes(shape: Shape) -> None:
    tile = form.tile_of(shape, form.tuning_for(shape))
    assert tile == PUBLISHED[shape] and shape.channels % tile == 0


def test_what_is_refused() -> None:
    lfm2 = Shape(2048, 3)
    conv = torch.empty(2, 2048, 2, dtype=torch.bfloat16, device="meta")
    right: dict[str, Any] = {"kind": torch.bfloat16, "conv": conv}
    assert refusal(lfm2, **right) is None
    assert refusal(lfm2, **{**right, "conv": conv[::2]}) is None
    wrong: dict[str, tuple[Shape, dict[str, Any]]] = {
        "2056 channels": (Shape(2056, 3), {}),
        "a convolution of width 6": (Shape(2048, 6), {}),
        "a convolution of width 1": (Shape(2048, 1), {}),
        "hidden states in torch.float32": (lfm2, {"kind": torch.float32}),
        "windows in torch.float32 for hidden states in torch.bfloat16": (lfm2, {"conv": conv.float()}),
        "windows of (2048, 3)": (lfm2, {"conv": torch.empty(2, 2048, 3, dtype=torch.bfloat16, device="meta")}),
    }
    for words, (shape, changed) in wrong.items():
        assert refusal(shape, **{**right, **changed}) == f"no kernel for {words}"


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    return mutants.fates("tests.kernels.short_conv_extend_mutants", list(MUTANTS))


@pytest.mark.parametrize("case", sorted({case for case, _, _ in MUTANTS.values()}))
def test_what_mutants_are_held_against(case: str) -> None:
    assert faults(case, (form, metadata)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


def test_the_compiler_takes_the_kernel(everything: bool) -> None:
    """The interpreter takes what the compiler refuses."""
    found = covering.compiled("tests.kernels.compile_short_conv_extend", everything)
    assert {(kernel["name"], kernel["capability"]) for kernel in found} == {("convolve", 90), ("convolve", 100)}
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        assert kernel["stack"] == 0, kernel


def test_the_gpu_script_finds_faults_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "tuning_for", lambda shape: TUNING)
    source, found = random.Random(0), []
    for seed in range(3):
        drawn = short_conv_extend.draw(short_conv_extend.SHAPES["narrow"], source, 130, seed, "cpu")
        around = random_steps.surroundings(drawn, source)
        found += short_conv_extend.faults(drawn, around, capture=lambda work: work)
    assert found == []
    # a graph that was captured with the first step's tables alone
    forgotten = short_conv_extend.faults(drawn, Surroundings(), capture=lambda work: lambda: None)
    assert any(fault.startswith("replayed: ") for fault in forgotten)
