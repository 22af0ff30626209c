# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention's extend: Triton's implementation against the fp32 reference, small, on its interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks import kda_extend
from sglang_bcg_fixes.kernels.kda_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.kda_extend import triton as implementation
from tests.kernels import accuracy, covering, kda_extend_mutants, linear_extend_tests
from tests.kernels import kda_extend_cases as cases
from tests.kernels.kda_extend_mutants import SAFE, TUNING, step
from tests.kernels.linear_extend_mutants import AROUND, CHUNK
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

STEPS: Steps = {
    **linear_extend_tests.STEPS,
    "with bias": ([19, 4], {"bias": True}),
    "gates near 0": ([40], {"gates": "near 0"}),
    "gates far below": ([40, 3], {"gates": "far below"}),
    "keys that forget unlike each other": ([40, 3], {"gates": "unlike"}),
    "gates with a lower bound": ([40, 3], {"shape": SAFE}),
    "gates at their lower bound": ([40, 3], {"shape": SAFE, "gates": "far below"}),
    "squashed betas": ([19, 4], {"is_squashed": True}),
    "keys alike": ([40], {"equal_keys": True, "gates": "near 0"}),
    **linear_extend_tests.WITH_CHECKPOINTS,
}
OPERATION = Operation(
    cases,
    kda_extend_mutants,
    stepwise,
    STEPS,
    of_bfloat16=2 * accuracy.TOLERANCE,
    shapes=[
        Shape(heads=2, keys=32, values=32, width=4),
        Shape(heads=3, keys=16, values=32, width=3),
        Shape(heads=1, keys=32, values=16, width=2),
        Shape(heads=1, keys=128, values=128, width=4),
        Shape(heads=1, keys=64, values=16, width=5, lower_bound=-5.0),
    ],
    narrow=Shape(1, 16, 16, 4),
    scratch="scores",
    script=(kda_extend, kda_extend.SHAPES["small"], "Tuning"),
)


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("gates", ["mixed", "near 0", "far below", "unlike"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(lengths: list[int], gates: str, dtype: torch.dtype) -> None:
    OPERATION.assert_right_in(dtype, step(lengths, dtype=dtype, gates=gates), 64)


@pytest.mark.parametrize("part", [16, 32])
def test_values_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 16, 32, 4), [20], dtype=torch.float16)
    launched = OPERATION.launched(drawn, AROUND, tuning=dataclasses.replace(TUNING, part=part))
    OPERATION.assert_right(drawn, launched.run())


def test_what_is_refused() -> None:
    published = Shape(heads=32, keys=128, values=128, width=4)
    wrong = {
        "heads of 96 keys and 128 values": dataclasses.replace(published, keys=96),
        "gates above 0.5": dataclasses.replace(published, lower_bound=0.5),
    }
    assert_refused(refusal, published, (32, 128, 128), wrong)
    assert_refused(refusal, dataclasses.replace(published, lower_bound=-5.0), (32, 128, 128), {})


def test_the_compiler_takes_every_kernel(everything: bool) -> None:
    """The interpreter takes what the compiler refuses; and products of a chunk run on Hopper's own instructions."""
    found = covering.compiled("tests.kernels.compile_kda_extend", everything)
    assert {(kernel["name"], kernel["capability"]) for kernel in found} == {
        (name, capability) for name in ("prepare", "advance") for capability in (90, 100)
    }
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        assert kernel["stack"] <= 512, kernel
        if kernel["name"] == "advance" and kernel["capability"] == 90:
            # the chain of products goes from registers to registers
            assert kernel["wgmma from registers"] >= 24, kernel


class Recorded:
    """Stand for a kernel: keep how it is launched, and launch nothing."""

    def __init__(self) -> None:
        self.warps: list[int] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *operands, **options: self.warps.append(options["num_warps"])


@pytest.mark.parametrize(("keys", "warps"), [(16, 4), (32, 4), (64, 4), (128, 8)])
def test_two_warpgroups_share_the_columns_of_no_narrow_product(
    monkeypatch: pytest.MonkeyPatch, keys: int, warps: int
) -> None:
    """On a GPU such a product reads past the end of shared memory, which no interpreter sees."""
    kernel = Recorded()
    monkeypatch.setattr(implementation, "prepare", kernel)
    drawn = cases.draw(Shape(2, keys, 16, 3), [3], device="cpu", dtype=torch.float32)
    launched = cases.Launched(drawn, implementation.Tuning(), AROUND, CHUNK)
    monkeypatch.setattr(implementation, "advance", kernel)
    launched.run()
    assert kernel.warps == [warps, implementation.Tuning().advance_warps]
