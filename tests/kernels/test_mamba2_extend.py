# SPDX-License-Identifier: Apache-2.0
"""Mamba2's extend: the Triton implementation against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from benchmarks import mamba2_extend
from sglang_bcg_fixes.kernels.linear_extend import generations
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.mamba2_extend import triton as implementation
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from tests.kernels import covering, linear_extend_tests, mamba2_extend_mutants
from tests.kernels import mamba2_extend_cases as cases
from tests.kernels.linear_extend_mutants import AROUND
from tests.kernels.linear_extend_tests import (  # noqa: F401
    Operation,
    Steps,
    assert_refused,
    noticed,
    operation,
    pytest_generate_tests,
    test_a_checkpoint_is_what_a_step_that_ends_there_leaves,
    test_a_mutant_is_noticed,
    test_against_the_reference,
    test_an_output_that_does_not_fit_is_refused,
    test_chunks_of_64,
    test_many_sequences,
    test_nothing_around_a_sequence_changes_its_bits,
    test_one_launch_serves_batch_after_batch,
    test_other_shapes,
    test_states_in_bfloat16,
    test_the_gpu_script_finds_faults_and_nothing_else,
    test_the_stepwise_implementation_against_the_reference,
    test_two_steps_are_one_long_step,
    test_what_is_not_a_number_stays_in_its_sequence,
    test_what_mutants_are_held_against,
    test_where_it_runs,
)
from tests.kernels.mamba2_extend_mutants import RELATED, TUNING

STEPS: Steps = {
    **linear_extend_tests.STEPS,
    "without bias": ([19, 4], {"bias": False}),
    "weights in half precision": ([19, 4], {"of_weights": torch.float16}),
    "gates near 0": ([40], {"gates": "near 0"}),
    "gates far below": ([40, 3], {"gates": "far below"}),
    "long steps": ([20, 3], {"gates": "long steps"}),
    **linear_extend_tests.WITH_CHECKPOINTS,
}
OPERATION = Operation(
    cases,
    mamba2_extend_mutants,
    stepwise,
    STEPS,
    # which are rounded by as much
    of_bfloat16=0.01,
    shapes=[
        Shape(heads=2, groups=1, head=32, states=64, width=4),
        Shape(heads=3, groups=3, head=16, states=32, width=3),
        Shape(heads=6, groups=2, head=48, states=16, width=2),
        Shape(heads=8, groups=8, head=16, states=16, width=4),
        Shape(heads=1, groups=1, head=64, states=128, width=4),
        Shape(heads=1, groups=1, head=128, states=256, width=4),
        Shape(heads=12, groups=1, head=16, states=16, width=4, least_step=0.1, most_step=0.3),
    ],
    narrow=Shape(2, 1, 16, 16, 4),
    scratch="mixed",
    script=(mamba2_extend, mamba2_extend.SMALL, "tuning_for"),
)


@pytest.mark.parametrize("name", ["checkpoints", "several chunks", "without prefix"])
def test_with_products_added_behind_as_on_blackwell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, asked = OPERATION.drawn(name), itertools.count()
    monkeypatch.setattr(generations, "is_newer_than_hopper", lambda output: next(asked) >= 0)
    OPERATION.assert_right(drawn, OPERATION.run(drawn))
    assert next(asked) > 0


@pytest.mark.parametrize("name", STEPS)
def test_with_products_computed_once_for_all_heads_of_a_group(name: str) -> None:
    drawn = OPERATION.drawn(name)
    once = OPERATION.launched(drawn, AROUND, tuning=RELATED).run()
    assert cases.differences(once, OPERATION.run(drawn), drawn.tokens) == []


@pytest.mark.parametrize("part", [16, 32])
def test_heads_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 1, 32, 16, 4), [20], dtype=torch.float16)
    tuning = dataclasses.replace(TUNING, few=(Walk(2, 4, 1, part),))
    OPERATION.assert_right(drawn, OPERATION.launched(drawn, AROUND, tuning=tuning).run())


@pytest.mark.parametrize("sequences", [64, 512])
def test_many_short_sequences(sequences: int) -> None:
    source = random.Random(sequences)
    # without prefix, so that nothing but the longest of them takes time
    drawn = cases.draw(
        Shape(heads=1, groups=1, head=16, states=16, width=4),
        [source.randint(1, 2) for _ in range(sequences)],
        dtype=torch.float16,
        fresh=range(0, sequences, 3),
    )
    OPERATION.assert_right(drawn, OPERATION.run(drawn, cases.Surroundings(padding=3)))


# of Nemotron-H-8B, a half and one of its eight ranks, Falcon-H1-34B and a half, Nemotron-Nano-9B-v2, and
# Granite-4.0-H-Small: channels of a tile, rows of a part with many sequences, and with few: up to how many, by rows of
# a part
PUBLISHED = {
    Shape(128, 8, 64, 128, 4): (128, 64, {64: 1}),
    Shape(64, 4, 64, 128, 4): (128, 64, {32: 1, 64: 2}),
    Shape(16, 1, 64, 128, 4): (64, 64, {16: 2, 64: 8}),
    Shape(32, 2, 128, 256, 4): (64, 64, {32: 1}),
    Shape(16, 1, 128, 256, 4): (64, 64, {16: 1, 32: 2}),
    Shape(128, 8, 80, 128, 4): (128, 16, {}),
    Shape(128, 1, 64, 128, 4): (128, 64, {64: 1}),
}


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_tiles_of_published_shapes(shape: Shape) -> None:
    tuning = implementation.tuning_for(shape)
    few = {walk.part_of(shape): walk.most_sequences(shape) for walk in tuning.few}
    assert (implementation.tile_of(shape, tuning), tuning.many.part_of(shape), few) == PUBLISHED[shape]
    # B.C is computed once for all heads of a group where that was measured to pay
    assert tuning.relates is (shape.states == 256)
    assert (
        shape.inner % implementation.tile_of(shape, tuning) == shape.states % implementation.tile_of(shape, tuning) == 0
    )


def test_what_is_refused() -> None:
    nemotron = Shape(128, 8, 64, 128, 4)
    wrong = {
        "heads of 72": dataclasses.replace(nemotron, head=72),
        "96 states": dataclasses.replace(nemotron, states=96),
        "128 heads in 12 groups": dataclasses.replace(nemotron, groups=12),
    }
    assert_refused(refusal, nemotron, (128, 64, 128), wrong)


def test_the_compiler_takes_every_kernel(everything: bool) -> None:
    """The interpreter takes what the compiler refuses; and products of a chunk run on Hopper's own instructions."""
    found = covering.compiled("tests.kernels.compile_mamba2_extend", everything)
    assert {kernel["name"] for kernel in found} == {"prepare", "relate", "advance"}
    assert {kernel["capability"] for kernel in found} == {90, 100}
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        # a kernel of which the compiler makes nothing has hardly any
        assert kernel["registers"] >= 24, kernel
        # on Blackwell nobody has chosen a tuning
        assert kernel["stack"] <= (512 if kernel["capability"] == 90 else 672), kernel
        if kernel["name"] == "advance" and kernel["part"] % 64 == 0 and kernel["capability"] == 90:
            # the state goes from registers to its product
            assert kernel["wgmma from registers"] >= kernel["states"] // 16, kernel
