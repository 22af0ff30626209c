# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention's extend: the Triton form against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks import kda_extend, random_steps
from sglang_bcg_fixes.kernels.kda_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.kda_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from sglang_bcg_fixes.model import Accepted, Rejected
from tests.kernels import accuracy, covering, linear_extend_cases, mutants
from tests.kernels import kda_extend_cases as cases
from tests.kernels.kda_extend_mutants import AROUND, CHUNK, EXACT, MUTANTS, SAFE, TUNING, faults, step

# a few numbers in bfloat16: one of them may be rounded badly and be half of a result
OF_HALVES = 2 * accuracy.TOLERANCE


def run(of: cases.Step, around: cases.Surroundings = AROUND, chunk: int = CHUNK) -> cases.After:
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
    "shorter than the window": ([1, 2, 3, 1], {"fresh": [3]}),
    "with bias": ([19, 4], {"bias": True}),
    "gates near 0": ([40], {"gates": "near 0"}),
    "gates far below": ([40, 3], {"gates": "far below"}),
    "keys that forget unlike each other": ([40, 3], {"gates": "unlike"}),
    "gates with a lower bound": ([40, 3], {"shape": SAFE}),
    "gates at their lower bound": ([40, 3], {"shape": SAFE, "gates": "far below"}),
    "squashed betas": ([19, 4], {"is_squashed": True}),
    "keys alike": ([40], {"equal_keys": True, "gates": "near 0"}),
    "checkpoints": ([40, 33, 16, 3, 5], {"tracked": {0: 39, 1: 33, 2: 16, 3: 3}, "fresh": [1]}),
    "checkpoints of some, and not at the end": ([49, 20, 20], {"tracked": {0: 17, 2: 20}, "gone": [1]}),
    "a checkpoint of nothing": ([20, 18], {"tracked": {0: 3, 1: 16}, "fresh": [0]}),
}


@pytest.mark.parametrize("name", STEPS)
def test_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


@pytest.mark.parametrize("name", STEPS)
def test_the_stepwise_form_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    launched = cases.Launched(drawn, stepwise.Tuning(), AROUND, CHUNK, (stepwise, stepwise))
    assert cases.faults(drawn, launched.run(), CHUNK, EXACT) == []


@pytest.mark.parametrize("name", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, kept=torch.bfloat16, **options)
    stepped = cases.Launched(drawn, stepwise.Tuning(), AROUND, CHUNK, (stepwise, stepwise))
    assert cases.faults(drawn, stepped.run(), CHUNK, OF_HALVES) == []
    after = run(drawn)
    assert cases.faults(drawn, after, CHUNK, OF_HALVES) == []
    # only the pool is in half precision: what is kept is the other's, rounded once
    exact = run(dataclasses.replace(drawn, state=drawn.state.float()))
    assert cases.same_bits(after.output, exact.output)
    used = [slot for slot in drawn.slots if slot >= 0]
    assert cases.same_bits(after.state[used], exact.state[used].bfloat16())


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("gates", ["mixed", "near 0", "far below", "unlike"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(lengths: list[int], gates: str, dtype: torch.dtype) -> None:
    drawn = step(lengths, dtype=dtype, gates=gates)
    tolerance = EXACT if dtype is torch.float16 else OF_HALVES
    assert cases.faults(drawn, run(drawn, chunk=64), 64, tolerance) == []


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, keys=32, values=32, width=4),
        Shape(heads=3, keys=16, values=32, width=3),
        Shape(heads=1, keys=32, values=16, width=2),
        Shape(heads=1, keys=128, values=128, width=4),
        Shape(heads=1, keys=64, values=16, width=5, lower_bound=-5.0),
    ],
    ids=str,
)
def test_other_shapes(shape: Shape) -> None:
    drawn = cases.draw(shape, [18, 5], device="cpu", dtype=torch.float16, fresh=[1])
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


def test_many_sequences() -> None:
    shape, lengths = Shape(1, 16, 16, 4), [1 + number % 3 for number in range(150)]
    drawn = cases.draw(shape, lengths, device="cpu", dtype=torch.float16, fresh=range(0, 150, 7), gone=[5, 149])
    around = dataclasses.replace(AROUND, max_sequences=serving.MOST_SEQUENCES)
    assert cases.faults(drawn, run(drawn, around), CHUNK, EXACT) == []


@pytest.mark.parametrize("part", [16, 32])
def test_values_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 16, 32, 4), [20], device="cpu", dtype=torch.float16)
    launched = cases.Launched(drawn, dataclasses.replace(TUNING, part=part), AROUND, CHUNK)
    assert cases.faults(drawn, launched.run(), CHUNK, EXACT) == []


def test_nothing_around_a_sequence_changes_its_bits() -> None:
    drawn = step([20, 7, 33, 1], fresh=[1], dtype=torch.bfloat16)
    together = run(drawn)
    bare = run(drawn, cases.Surroundings())
    assert cases.differences(together, bare, drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([20, 18, 9]), run)


def test_one_launch_serves_batch_after_batch() -> None:
    """Buffers and launches as a graph keeps them, batches as a server has them, scratch as the last one left it."""
    for drawn, around in linear_extend_cases.batch_after_batch(step):
        assert cases.faults(drawn, run(drawn, around), CHUNK, EXACT) == [], drawn.lengths


def test_two_steps_are_one_long_step() -> None:
    drawn = step([40])
    whole = run(drawn)
    # the second half begins where the first one ends, in its slot
    first, second = (
        drawn.with_projections(*(tensor[rows] for tensor in drawn.projections), lengths=[rows.stop - rows.start])
        for rows in (slice(0, 16), slice(16, 40))
    )
    between = run(first)
    after = run(dataclasses.replace(second, conv=between.conv, state=between.state, prefixes=[80]))
    slot = drawn.slots[0]
    assert cases.same_bits(after.output[:24], whole.output[16:40])
    assert cases.same_bits(after.state[slot], whole.state[slot])
    assert cases.same_bits(after.conv[slot], whole.conv[slot])


def test_a_checkpoint_is_what_a_step_that_ends_there_leaves() -> None:
    drawn = step([40], tracked={0: 35})
    after = run(drawn)
    ends = drawn.with_projections(*(tensor[:32] for tensor in drawn.projections), lengths=[32], tracked=[None])
    there, slot, kept = run(ends), drawn.slots[0], drawn.track_slots[0]
    assert cases.same_bits(after.state[kept], there.state[slot])
    assert cases.same_bits(after.conv[kept], there.conv[slot])


def test_an_output_that_does_not_fit_is_refused() -> None:
    drawn = step([20])
    launched = cases.Launched(drawn, TUNING, cases.Surroundings(), CHUNK)
    launched.fill()
    launched.scratch.scores = launched.scratch.scores[:, :7]
    with pytest.raises(ValueError, match="the scratch is for 7 rows, too few for an output of 20"):
        launched.extend()
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


KIMI_LINEAR = Shape(heads=32, keys=128, values=128, width=4)


def test_what_is_refused() -> None:
    conv = torch.empty(2, KIMI_LINEAR.channels, 3, dtype=torch.bfloat16, device="meta")
    state = torch.empty(2, 32, 128, 128, device="meta")
    right: dict[str, Any] = {"kind": torch.bfloat16, "activation": "silu", "conv": conv, "state": state}
    assert refusal(KIMI_LINEAR, **right) is None
    assert refusal(dataclasses.replace(KIMI_LINEAR, lower_bound=-5.0), **right) is None
    assert refusal(KIMI_LINEAR, **{**right, "state": state[::2]}) is None
    assert refusal(KIMI_LINEAR, **{**right, "state": state.bfloat16()}) is None
    wrong: dict[str, tuple[Shape, dict[str, Any]]] = {
        "heads of 96 keys and 128 values": (dataclasses.replace(KIMI_LINEAR, keys=96), {}),
        "gates above 0.5": (dataclasses.replace(KIMI_LINEAR, lower_bound=0.5), {}),
        "a convolution of width 6": (dataclasses.replace(KIMI_LINEAR, width=6), {}),
        "the activation None": (KIMI_LINEAR, {"activation": None}),
        "projections in torch.float32": (KIMI_LINEAR, {"kind": torch.float32}),
        "windows in torch.float32": (KIMI_LINEAR, {"conv": conv.float()}),
        "windows of (12288, 4)": (KIMI_LINEAR, {"conv": torch.empty(2, 12288, 4, dtype=torch.bfloat16, device="meta")}),
        "states in torch.float16": (KIMI_LINEAR, {"state": state.half()}),
        "states of (32, 128, 64)": (KIMI_LINEAR, {"state": state[..., :64]}),
        "states with strides": (KIMI_LINEAR, {"state": state.transpose(2, 3)}),
    }
    for words, (shape, changed) in wrong.items():
        said = refusal(shape, **{**right, **changed})
        assert said is not None and said.startswith(f"no kernel for {words}"), said


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    return mutants.fates("tests.kernels.kda_extend_mutants", list(MUTANTS))


@pytest.mark.parametrize("case", sorted({case for case, _, _ in MUTANTS.values()}))
def test_what_mutants_are_held_against(case: str) -> None:
    assert faults(case, (form, metadata)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


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


def test_the_gpu_script_finds_faults_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "Tuning", lambda: TUNING)
    source, found = random.Random(0), []
    for seed in range(3):
        drawn = kda_extend.draw(kda_extend.SHAPES["small"], source, 130, seed, "cpu")
        around = random_steps.surroundings(drawn, source)
        found += kda_extend.faults(drawn, around, capture=lambda work: work)
    assert found == []
    # a graph that was captured with the first step's tables alone
    forgotten = kda_extend.faults(drawn, cases.Surroundings(), capture=lambda work: lambda: None)
    assert any(fault.startswith("replayed: ") for fault in forgotten)


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
    monkeypatch.setattr(form, "prepare", kernel)
    drawn = cases.draw(Shape(2, keys, 16, 3), [3], device="cpu", dtype=torch.float32)
    launched = cases.Launched(drawn, form.Tuning(), AROUND, CHUNK)
    monkeypatch.setattr(form, "advance", kernel)
    launched.run()
    assert kernel.warps == [warps, form.Tuning().advance_warps]
