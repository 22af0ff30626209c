# SPDX-License-Identifier: Apache-2.0
"""The short convolution's extend: both implementations against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks import short_conv_extend
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from sglang_bcg_fixes.kernels.short_conv_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.short_conv_extend import triton as implementation
from tests.kernels import covering, linear_extend_cases, linear_extend_tests, short_conv_extend_mutants
from tests.kernels import short_conv_extend_cases as cases
from tests.kernels.linear_extend_cases import Surroundings, same_bits
from tests.kernels.linear_extend_mutants import AROUND, CHUNK
from tests.kernels.linear_extend_tests import (  # noqa: F401
    Operation,
    Steps,
    noticed,
    operation,
    pytest_generate_tests,
    test_a_mutant_is_noticed,
    test_against_the_reference,
    test_chunks_of_64,
    test_nothing_around_a_sequence_changes_its_bits,
    test_one_launch_serves_batch_after_batch,
    test_the_gpu_script_finds_faults_and_nothing_else,
    test_the_stepwise_implementation_against_the_reference,
    test_what_mutants_are_held_against,
    test_where_it_runs,
)
from tests.kernels.short_conv_extend_mutants import TUNING, step

STEPS: Steps = {
    **linear_extend_tests.STEPS,
    "shorter than the window": ([1, 1, 2, 1], {"fresh": [3]}),
    "with bias": ([19, 4], {"bias": True}),
    "weights in single precision": ([19, 4], {"of_weights": torch.float32}),
}
OPERATION = Operation(
    cases,
    short_conv_extend_mutants,
    stepwise,
    STEPS,
    # which are rounded by as much
    of_bfloat16=0.004,
    neighbours=(20, 7, 33, 1, 2),
    script=(short_conv_extend, short_conv_extend.SHAPES["narrow"], "tuning_for"),
)


@pytest.mark.parametrize("name", STEPS)
def test_both_implementations_have_the_same_bits(name: str) -> None:
    drawn = OPERATION.drawn(name, dtype=torch.bfloat16, of_weights=None)
    other = OPERATION.run_stepwise(drawn)
    assert linear_extend_cases.differences(OPERATION.run(drawn), other, drawn.tokens) == []


@pytest.mark.parametrize(
    "shape", [Shape(16, 2), Shape(32, 3), Shape(48, 4), Shape(80, 5), Shape(128, 3), Shape(192, 3)], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_other_shapes_as_they_are_tuned(shape: Shape, bias: bool) -> None:
    drawn = cases.draw(shape, [18, 5, 1, 2], dtype=torch.float16, fresh=[1, 3], bias=bias)
    tuning = dataclasses.replace(implementation.tuning_for(shape), programs=5)
    OPERATION.assert_right(drawn, cases.Launched(drawn, tuning, AROUND).run())


@pytest.mark.parametrize("sequences", [1, 64, serving.MOST_SEQUENCES])
def test_many_short_sequences(sequences: int) -> None:
    source = random.Random(sequences)
    lengths = [source.randint(1, 4) for _ in range(sequences)]
    drawn = cases.draw(
        Shape(16, 3), lengths, dtype=torch.float16, fresh=range(0, sequences, 3), gone=range(5, sequences, 100)
    )
    around = Surroundings(padding=3, max_sequences=serving.MOST_SEQUENCES)
    OPERATION.assert_right(drawn, OPERATION.run(drawn, around))


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    drawn = step([20, 18, 9])
    right, rows = OPERATION.run(drawn), drawn.rows(1)
    drawn.inputs[rows] = linear_extend_cases.NAN
    after = OPERATION.run(drawn)
    assert bool(after.output[rows].isnan().all()) and bool(after.conv[drawn.slots[1]].isnan().all())
    for number in (0, 2):
        slot = drawn.slots[number]
        assert same_bits(after.output[drawn.rows(number)], right.output[drawn.rows(number)])
        assert same_bits(after.conv[slot], right.conv[slot])


@pytest.mark.parametrize("cuts", [[16], [1], [1, 2, 3], [39]], ids=str)
def test_a_prompt_in_pieces_is_the_whole_prompt(cuts: list[int]) -> None:
    drawn = step([40])
    whole, slot, conv = OPERATION.run(drawn), drawn.slots[0], drawn.conv
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        piece = drawn.with_projections(drawn.inputs[start:end], lengths=[end - start], conv=conv)
        after = OPERATION.run(piece)
        assert same_bits(after.output[: end - start], whole.output[start:end])
        conv = after.conv
    assert same_bits(conv[slot], whole.conv[slot])


@pytest.mark.parametrize("of", [(implementation, metadata), (stepwise, stepwise)], ids=["triton", "reference"])
def test_an_output_that_does_not_fit_is_refused(of: tuple[Any, Any]) -> None:
    drawn = step([20])
    launched = cases.Launched(drawn, TUNING, Surroundings(), CHUNK, of)
    launched.fill()
    launched.tables.max_tokens = 19
    with pytest.raises(ValueError, match="an output of 20 rows, but the tables were made for 19 tokens"):
        launched.extend()


# of LFM2-350M, -700M, -1.2B and -8B-A1B, one of eight ranks: channels of a tile
PUBLISHED = {Shape(1024, 3): 64, Shape(1536, 3): 64, Shape(2048, 3): 64, Shape(192, 3): 64, Shape(48, 3): 16}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_tiles_of_published_shapes(shape: Shape) -> None:
    tile = implementation.tile_of(shape, implementation.tuning_for(shape))
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


def test_the_compiler_takes_the_kernel(everything: bool) -> None:
    """The interpreter takes what the compiler refuses."""
    found = covering.compiled("tests.kernels.compile_short_conv_extend", everything)
    assert {(kernel["name"], kernel["capability"]) for kernel in found} == {("convolve", 90), ("convolve", 100)}
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        assert kernel["stack"] == 0, kernel
