# SPDX-License-Identifier: Apache-2.0
"""Lightning attention's extend: the Triton form against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from benchmarks import lightning_extend, random_steps
from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.model import Accepted, Rejected
from tests.kernels import covering, linear_extend_cases, mutants
from tests.kernels import lightning_extend_cases as cases
from tests.kernels.lightning_extend_mutants import AROUND, CHUNK, EXACT, MUTANTS, ROUNDED, TUNING, faults, step
from tests.kernels.linear_extend_cases import Surroundings

# of an output in half precision, by its dtype
LIMITS = {torch.float32: EXACT, torch.float16: 0.0003, torch.bfloat16: ROUNDED}


def run(of: cases.Step, around: Surroundings = AROUND, chunk: int = CHUNK) -> linear_extend_cases.After:
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
    "heads that hardly forget": ([40], {"decays": "near 0"}),
    "heads that forget at once": ([40, 3], {"decays": "at once"}),
    "checkpoints": ([40, 33, 16, 3, 5], {"tracked": {0: 39, 1: 33, 2: 16, 3: 3}, "fresh": [1]}),
    "checkpoints of some, and not at the end": ([49, 20, 20], {"tracked": {0: 17, 2: 20}, "gone": [1]}),
    "a checkpoint of nothing": ([20, 18], {"tracked": {0: 3, 1: 16}, "fresh": [0]}),
}


@pytest.mark.parametrize("name", STEPS)
def test_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    assert linear_extend_cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_chunks_of_64(lengths: list[int], dtype: torch.dtype) -> None:
    drawn = step(lengths, dtype=dtype)
    assert linear_extend_cases.faults(drawn, run(drawn, chunk=64), 64, LIMITS[dtype]) == []


@pytest.mark.parametrize("name", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, kept=torch.bfloat16, **options)
    after = run(drawn)
    # only the pool is in half precision: what is kept is the other's, rounded once
    exact = run(dataclasses.replace(drawn, state=drawn.state.float()))
    assert linear_extend_cases.same_bits(after.output, exact.output)
    used = [slot for slot in drawn.slots if slot >= 0]
    assert linear_extend_cases.same_bits(after.state[used], exact.state[used].bfloat16())


@pytest.mark.parametrize("shape", [Shape(2, 128), Shape(5, 64), Shape(1, 16)], ids=str)
def test_other_shapes(shape: Shape) -> None:
    drawn = cases.draw(shape, [18, 5], fresh=[1])
    assert linear_extend_cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


def test_nothing_around_a_sequence_changes_its_bits() -> None:
    drawn = step([20, 7, 33, 1], fresh=[1], dtype=torch.bfloat16)
    together = run(drawn)
    bare = run(drawn, Surroundings())
    assert linear_extend_cases.differences(together, bare, drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([20, 18, 9]), run)


def test_one_launch_serves_batch_after_batch() -> None:
    """Buffers and launches as a graph keeps them, batches as a server has them."""
    for drawn, around in linear_extend_cases.batch_after_batch(step):
        assert linear_extend_cases.faults(drawn, run(drawn, around), CHUNK, EXACT) == [], drawn.lengths


def test_many_short_sequences() -> None:
    source = random.Random(0)
    lengths = [source.randint(1, 2) for _ in range(128)]
    drawn = cases.draw(Shape(1, 16), lengths, fresh=range(0, 128, 3))
    assert linear_extend_cases.faults(drawn, run(drawn, Surroundings(padding=3)), CHUNK, EXACT) == []


def test_two_steps_are_one_long_step() -> None:
    drawn = step([40])
    whole = run(drawn)
    # the second half begins where the first one ends, in its slot
    first, second = (
        drawn.with_projections(*(tensor[rows] for tensor in drawn.projections), lengths=[rows.stop - rows.start])
        for rows in (slice(0, 16), slice(16, 40))
    )
    again = run(dataclasses.replace(second, state=run(first).state, prefixes=[80]))
    slot = drawn.slots[0]
    # a step ends where a chunk does, and its state is kept in fp32
    assert linear_extend_cases.same_bits(again.output[:24], whole.output[16:40])
    assert linear_extend_cases.same_bits(again.state[slot], whole.state[slot])


def test_a_checkpoint_is_what_a_step_that_ends_there_leaves() -> None:
    drawn = step([40], tracked={0: 35})
    ends = drawn.with_projections(*(tensor[:32] for tensor in drawn.projections), lengths=[32], tracked=[None])
    kept, there = run(drawn).state[drawn.track_slots[0]], run(ends).state[drawn.slots[0]]
    assert linear_extend_cases.same_bits(kept, there)


def test_an_output_that_does_not_fit_is_refused() -> None:
    drawn = step([20])
    launched = cases.Launched(drawn, TUNING, Surroundings(), CHUNK)
    launched.fill()
    launched.tables.max_tokens = 19
    with pytest.raises(ValueError, match="20 rows, but the tables were made for 19 tokens"):
        launched.extend()


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_where_it_runs(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = form.ready(0)
    if runs:
        assert isinstance(answer, Accepted)
    else:
        assert isinstance(answer, Rejected) and f"sm_{capability[0]}{capability[1]}" in answer.reason


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    return mutants.fates("tests.kernels.lightning_extend_mutants", list(MUTANTS))


@pytest.mark.parametrize("case", sorted({case for case, _, _ in MUTANTS.values()}))
def test_what_mutants_are_held_against(case: str) -> None:
    assert faults(case, (form, metadata)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


def test_the_compiler_takes_every_kernel(everything: bool) -> None:
    """The interpreter takes what the compiler refuses."""
    found = covering.compiled("tests.kernels.compile_lightning_extend", everything)
    assert {kernel["name"] for kernel in found} == {"relate", "advance", "clear"}
    assert {kernel["capability"] for kernel in found} == {90, 100}
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        # a kernel of which the compiler makes nothing has hardly any
        assert kernel["registers"] >= 24, kernel
        if kernel.get("part", 0) >= 64:
            # the state goes from registers to its product, and in part to memory, which was measured to pay
            assert kernel["wgmma from registers"] > 0 and kernel["stack"] <= 384, kernel
        else:
            # TF32 takes more registers than there are, by little
            assert kernel["stack"] <= (192 if kernel["kind"] == "*fp32" else 64), kernel


def test_the_gpu_script_finds_faults_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "tuning_for", lambda shape, q: TUNING)
    source, found = random.Random(0), []
    for seed in range(3):
        drawn = lightning_extend.draw(lightning_extend.SHAPES["small"], source, 130, seed, "cpu")
        around = random_steps.surroundings(drawn, source)
        found += lightning_extend.faults(drawn, around, capture=lambda work: work)
    assert found == []
    # a graph that was captured with the first step's tables alone
    forgotten = lightning_extend.faults(drawn, Surroundings(), capture=lambda work: lambda: None)
    assert any(fault.startswith("replayed: ") for fault in forgotten)
