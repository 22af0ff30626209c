# SPDX-License-Identifier: Apache-2.0
"""Tests of a linear layer's extend that several layers have: its Triton implementation, small, on Triton's interpreter.

A file of tests names its layer's `OPERATION`, and imports from here what it has; each test is run on that.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from benchmarks import random_steps
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from sglang_bcg_fixes.model import Accepted, Rejected
from tests.kernels import linear_extend_cases, mutants
from tests.kernels.linear_extend_cases import After, Step, Surroundings, same_bits
from tests.kernels.linear_extend_mutants import AROUND, CHUNK

# of a step: its lengths, and what else it is drawn with
Steps = dict[str, tuple[list[int], dict[str, Any]]]

STEPS: Steps = {
    "one token": ([1], {}),
    "around a chunk": ([15, 16, 17], {}),
    "several chunks": ([70, 31, 48], {}),
    "nobody": ([0, 0], {}),
    "some have nothing": ([0, 3, 0, 18, 0], {"fresh": [2]}),
    "without prefix": ([20, 2, 16, 1], {"fresh": [0, 1]}),
    "without a slot": ([20, 2, 16, 1], {"gone": [0, 2]}),
    "all without a slot": ([20, 2], {"gone": [0, 1]}),
    "shorter than the window": ([1, 2, 3, 1], {"fresh": [3]}),
}
WITH_CHECKPOINTS: Steps = {
    "checkpoints": ([40, 33, 16, 3, 5], {"tracked": {0: 39, 1: 33, 2: 16, 3: 3}, "fresh": [1]}),
    "checkpoints of some, and not at the end": ([49, 20, 20], {"tracked": {0: 17, 2: 20}, "gone": [1]}),
    "a checkpoint of nothing": ([20, 18], {"tracked": {0: 3, 1: 16}, "fresh": [0]}),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A layer's extend under test."""

    # the layer's modules: how steps are drawn and launched, its wrong kernels, its implementation without chunks
    cases: Any
    mutants: Any
    stepwise: Any
    steps: Steps
    # the bound of errors with inputs or states in bfloat16
    of_bfloat16: float
    shapes: Sequence[Any] = ()
    # one whose sequences take little time
    narrow: Any = None
    # of sequences that must not see each other, and where they must not see what is around them
    neighbours: Sequence[int] = (20, 7, 33, 1)
    elsewhere: Sequence[Surroundings] = (Surroundings(),)
    # the tensor of the scratch whose second dimension are rows
    scratch: str = ""
    capabilities: Sequence[tuple[tuple[int, int], bool]] = (
        *(((8, 0), False), ((9, 0), True)),
        *(((10, 0), True), ((12, 0), False)),
    )
    # the layer's module of `benchmarks`, which of its shapes is small, and what chooses the implementation's tuning
    script: tuple[Any, Any, str] | None = None

    def run(self, step: Any, around: Surroundings = AROUND, chunk: int = CHUNK) -> After:
        found: After = self.launched(step, around, chunk).run()
        return found

    def launched(self, step: Any, around: Surroundings, chunk: int = CHUNK, tuning: Any = None) -> Any:
        return self.cases.Launched(step, tuning or self.mutants.TUNING, around, chunk)

    def run_stepwise(self, step: Any) -> After:
        of_steps = (self.stepwise, self.stepwise)
        found: After = self.cases.Launched(step, self.stepwise.Tuning(), AROUND, CHUNK, of_steps).run()
        return found

    def drawn(self, name: str, **options: Any) -> Any:
        lengths, others = self.steps[name]
        return self.mutants.step(lengths, **{**others, **options})

    def assert_right(self, step: Step, after: After, chunk: int = CHUNK, tolerance: float = 0) -> None:
        found = linear_extend_cases.faults(step, after, chunk, tolerance or self.mutants.EXACT)
        assert found == [], f"{step.lengths}: {found}"

    def assert_right_in(self, dtype: torch.dtype, step: Step, chunk: int) -> None:
        """Compare with the reference; in bfloat16 a few numbers may be rounded badly and be half of a result."""
        tolerance = self.of_bfloat16 if dtype is torch.bfloat16 else 0
        self.assert_right(step, self.run(step, chunk=chunk), chunk, tolerance)


def assert_only_the_pool_is_rounded(step: Any, after: After, run: Callable[[Any], After]) -> None:
    """Compare states that are kept in bfloat16 with those of the same step in fp32, rounded once."""
    exact = run(dataclasses.replace(step, state=step.state.float()))
    assert same_bits(after.output, exact.output)
    kept = [slot for slot in step.slots if slot >= 0]
    kept += [slot for slot, length in zip(step.track_slots, step.tracked, strict=True) if length is not None]
    assert same_bits(after.state[kept], exact.state[kept].bfloat16())


def assert_refused(refusal: Any, published: Any, sizes: tuple[int, int, int], wrong: Mapping[str, Any]) -> None:
    """Ask about a published shape with pools of states of these sizes, about wrong shapes and about other tensors."""
    conv = torch.empty(2, published.channels, 3, dtype=torch.bfloat16, device="meta")
    state = torch.empty(2, *sizes, device="meta")
    right: dict[str, Any] = {"kind": torch.bfloat16, "activation": "silu", "conv": conv, "state": state}
    for changed in ({}, {"state": state[::2]}, {"state": state.bfloat16()}):
        assert refusal(published, **{**right, **changed}) is None
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        **{words: (shape, {}) for words, shape in wrong.items()},
        "a convolution of width 6": (dataclasses.replace(published, width=6), {}),
        "the activation None": (published, {"activation": None}),
        "projections in torch.float32": (published, {"kind": torch.float32}),
        "windows in torch.float32": (published, {"conv": conv.float()}),
        f"windows of ({published.channels}, 4)": (published, {"conv": torch.cat([conv, conv[..., :1]], 2)}),
        "states in torch.float16": (published, {"state": state.half()}),
        f"states of {(*sizes[:2], 64)}": (published, {"state": state[..., :64]}),
        "states with strides": (published, {"state": state.mT.contiguous().mT}),
    }
    for words, (shape, changed) in given.items():
        said = refusal(shape, **{**right, **changed})
        assert said is not None and said.startswith(f"no kernel for {words}"), f"{words}: {said}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__module__ != __name__:
        return
    operation: Operation = metafunc.module.OPERATION
    wrong = operation.mutants.MUTANTS
    for names, values in {
        "name": operation.steps,
        "shape": operation.shapes,
        "capability, runs": operation.capabilities,
        "case": sorted({case for case, _, _ in wrong.values()}),
        "mutant": wrong,
    }.items():
        if names.partition(",")[0] in metafunc.fixturenames:
            metafunc.parametrize(names, list(values), ids=str if names == "shape" else None)


@pytest.fixture
def operation(request: pytest.FixtureRequest) -> Operation:
    found: Operation = request.module.OPERATION
    return found


def test_against_the_reference(operation: Operation, name: str) -> None:
    step = operation.drawn(name)
    operation.assert_right(step, operation.run(step))


def test_the_stepwise_implementation_against_the_reference(operation: Operation, name: str) -> None:
    step = operation.drawn(name)
    operation.assert_right(step, operation.run_stepwise(step))


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(operation: Operation, lengths: list[int], dtype: torch.dtype) -> None:
    operation.assert_right_in(dtype, operation.mutants.step(lengths, dtype=dtype), 64)


@pytest.mark.parametrize("kept", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(operation: Operation, kept: str) -> None:
    step = operation.drawn(kept, kept=torch.bfloat16)
    operation.assert_right(step, operation.run_stepwise(step), tolerance=operation.of_bfloat16)
    after = operation.run(step)
    operation.assert_right(step, after, tolerance=operation.of_bfloat16)
    assert_only_the_pool_is_rounded(step, after, operation.run)


def test_other_shapes(operation: Operation, shape: Any) -> None:
    step = operation.cases.draw(shape, [18, 5], dtype=torch.float16, fresh=[1])
    operation.assert_right(step, operation.run(step))


def test_many_sequences(operation: Operation) -> None:
    lengths = [1 + number % 3 for number in range(150)]
    step = operation.cases.draw(operation.narrow, lengths, dtype=torch.float16, fresh=range(0, 150, 7), gone=[5, 149])
    around = dataclasses.replace(AROUND, max_sequences=serving.MOST_SEQUENCES)
    operation.assert_right(step, operation.run(step, around))


def test_nothing_around_a_sequence_changes_its_bits(operation: Operation) -> None:
    step = operation.mutants.step(list(operation.neighbours), fresh=[1], dtype=torch.bfloat16)
    together = operation.run(step)
    for around in operation.elsewhere:
        found = linear_extend_cases.differences(together, operation.run(step, around), step.tokens)
        assert found == [], f"{around}: {found}"
    linear_extend_cases.assert_neighbours_change_nothing(step, together, operation.run)


def test_what_is_not_a_number_stays_in_its_sequence(operation: Operation) -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(operation.mutants.step([20, 18, 9]), operation.run)


def test_one_launch_serves_batch_after_batch(operation: Operation) -> None:
    """Buffers and launches as a graph keeps them, batches as a server has them, scratch as the last one left it."""
    for step, around in linear_extend_cases.batch_after_batch(operation.mutants.step):
        operation.assert_right(step, operation.run(step, around))


def test_two_steps_are_one_long_step(operation: Operation) -> None:
    step = operation.mutants.step([40])
    whole = operation.run(step)
    # the second half begins where the first one ends, in its slot
    first, second = (
        step.with_projections(*(tensor[rows] for tensor in step.projections), lengths=[rows.stop - rows.start])
        for rows in (slice(0, 16), slice(16, 40))
    )
    between = operation.run(first)
    after = operation.run(dataclasses.replace(second, conv=between.conv, state=between.state, prefixes=[80]))
    # a step ends where a chunk does, and its state is kept in fp32
    assert same_bits(torch.cat([between.output[:16], after.output[:24]]), whole.output[:40])
    assert same_bits(after.conv, whole.conv) and same_bits(after.state, whole.state)


def test_a_checkpoint_is_what_a_step_that_ends_there_leaves(operation: Operation) -> None:
    step = operation.mutants.step([40], tracked={0: 35})
    after = operation.run(step)
    ends = step.with_projections(*(tensor[:32] for tensor in step.projections), lengths=[32], tracked=[None])
    there, slot, kept = operation.run(ends), step.slots[0], step.track_slots[0]
    assert same_bits(after.state[kept], there.state[slot])
    assert same_bits(after.conv[kept], there.conv[slot])


def test_an_output_that_does_not_fit_is_refused(operation: Operation) -> None:
    launched = operation.launched(operation.mutants.step([20]), Surroundings())
    launched.fill()
    setattr(launched.scratch, operation.scratch, getattr(launched.scratch, operation.scratch)[:, :7])
    with pytest.raises(ValueError, match="the scratch is for 7 rows, too few for an output of 20"):
        launched.extend()
    launched.tables.max_tokens = 19
    with pytest.raises(ValueError, match="an output of 20 rows, but the tables were made for 19 tokens"):
        launched.extend()


def test_where_it_runs(
    operation: Operation, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    implementation, _ = operation.cases.Launched.modules
    answer = implementation.ready(0)
    if runs:
        assert isinstance(answer, Accepted)
    else:
        assert isinstance(answer, Rejected) and f"sm_{capability[0]}{capability[1]}" in answer.reason


@pytest.fixture(scope="module")
def noticed(request: pytest.FixtureRequest) -> dict[str, bool]:
    of = request.module.OPERATION.mutants
    return mutants.fates(of.__name__, list(of.MUTANTS))


def test_what_mutants_are_held_against(operation: Operation, case: str) -> None:
    implementation, _ = operation.cases.Launched.modules
    found = operation.mutants.faults(case, (implementation, metadata))
    assert found == [], found


def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant], mutant


def test_the_gpu_script_finds_faults_and_nothing_else(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operation.script is not None
    script, small, tuned = operation.script
    implementation, _ = operation.cases.Launched.modules
    monkeypatch.setattr(implementation, tuned, lambda *given: operation.mutants.TUNING)
    source, found = random.Random(0), []
    for seed in range(3):
        step = script.draw(small, source, 130, seed, "cpu")
        found += script.faults(step, random_steps.surroundings(step, source), capture=lambda work: work)
    assert found == [], found
    # a graph that was captured with the first step's tables alone
    forgotten = script.faults(step, Surroundings(), capture=lambda work: lambda: None)
    assert any(fault.startswith("replayed: ") for fault in forgotten), forgotten
