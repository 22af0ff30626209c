# SPDX-License-Identifier: Apache-2.0
"""Mamba2's extend: the Triton form against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from benchmarks import mamba2_extend, random_steps
from sglang_bcg_fixes.kernels.linear_extend import generations, metadata, serving
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.mamba2_extend import triton as form
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from sglang_bcg_fixes.model import Accepted, Rejected
from tests.kernels import covering, linear_extend_cases, mutants
from tests.kernels import mamba2_extend_cases as cases
from tests.kernels.mamba2_extend_mutants import AROUND, CHUNK, EXACT, MUTANTS, RELATED, TUNING, faults, step

# of results in bfloat16, which are rounded by as much
OF_HALVES = 0.01


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
    "without bias": ([19, 4], {"bias": False}),
    "weights in half precision": ([19, 4], {"of_weights": torch.float16}),
    "gates near 0": ([40], {"gates": "near 0"}),
    "gates far below": ([40, 3], {"gates": "far below"}),
    "long steps": ([20, 3], {"gates": "long steps"}),
    "checkpoints": ([40, 33, 16, 3, 5], {"tracked": {0: 39, 1: 33, 2: 16, 3: 3}, "fresh": [1]}),
    "checkpoints of some, and not at the end": ([49, 20, 20], {"tracked": {0: 17, 2: 20}, "gone": [1]}),
    "a checkpoint of nothing": ([20, 18], {"tracked": {0: 3, 1: 16}, "fresh": [0]}),
}


@pytest.mark.parametrize("name", STEPS)
def test_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


@pytest.mark.parametrize("name", ["checkpoints", "several chunks", "without prefix"])
def test_with_products_added_behind_as_on_blackwell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, options = STEPS[name]
    drawn, asked = step(lengths, **options), itertools.count()
    monkeypatch.setattr(generations, "is_newer_than_hopper", lambda output: next(asked) >= 0)
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []
    assert next(asked) > 0


@pytest.mark.parametrize("name", STEPS)
def test_with_products_computed_once_for_all_heads_of_a_group(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    once = cases.Launched(drawn, RELATED, AROUND, CHUNK).run()
    assert cases.differences(once, run(drawn), drawn.tokens) == []


@pytest.mark.parametrize("name", STEPS)
def test_the_stepwise_form_against_the_reference(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    launched = cases.Launched(drawn, stepwise.Tuning(), AROUND, CHUNK, (stepwise, stepwise))
    assert cases.faults(drawn, launched.run(), CHUNK, EXACT) == []


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(lengths: list[int], dtype: torch.dtype) -> None:
    drawn = step(lengths, dtype=dtype)
    assert cases.faults(drawn, run(drawn, chunk=64), 64, EXACT if dtype is torch.float16 else OF_HALVES) == []


@pytest.mark.parametrize("name", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(name: str) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, kept=torch.bfloat16, **options)
    after = run(drawn)
    assert cases.faults(drawn, after, CHUNK, OF_HALVES) == []
    # only the pool is in half precision: what is kept is the other's, rounded once
    exact = run(dataclasses.replace(drawn, state=drawn.state.float()))
    assert cases.same_bits(after.output, exact.output)
    used = [slot for slot in drawn.slots if slot >= 0]
    assert cases.same_bits(after.state[used], exact.state[used].bfloat16())


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, groups=1, head=32, states=64, width=4),
        Shape(heads=3, groups=3, head=16, states=32, width=3),
        Shape(heads=6, groups=2, head=48, states=16, width=2),
        Shape(heads=8, groups=8, head=16, states=16, width=4),
        Shape(heads=1, groups=1, head=64, states=128, width=4),
        Shape(heads=1, groups=1, head=128, states=256, width=4),
        Shape(heads=12, groups=1, head=16, states=16, width=4, least_step=0.1, most_step=0.3),
    ],
    ids=str,
)
def test_other_shapes(shape: Shape) -> None:
    drawn = cases.draw(shape, [18, 5], device="cpu", dtype=torch.float16, fresh=[1])
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


def test_many_sequences() -> None:
    shape, lengths = Shape(2, 1, 16, 16, 4), [1 + number % 3 for number in range(150)]
    drawn = cases.draw(shape, lengths, device="cpu", dtype=torch.float16, fresh=range(0, 150, 7), gone=[5, 149])
    around = dataclasses.replace(AROUND, max_sequences=serving.MOST_SEQUENCES)
    assert cases.faults(drawn, run(drawn, around), CHUNK, EXACT) == []


@pytest.mark.parametrize("part", [16, 32])
def test_heads_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 1, 32, 16, 4), [20], device="cpu", dtype=torch.float16)
    tuning = dataclasses.replace(TUNING, few=(Walk(2, 4, 1, part),))
    launched = cases.Launched(drawn, tuning, AROUND, CHUNK)
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


@pytest.mark.parametrize("sequences", [64, 512])
def test_many_short_sequences(sequences: int) -> None:
    source = random.Random(sequences)
    # without prefix, so that nothing but the longest of them takes time
    drawn = cases.draw(
        Shape(heads=1, groups=1, head=16, states=16, width=4),
        [source.randint(1, 2) for _ in range(sequences)],
        device="cpu",
        dtype=torch.float16,
        fresh=range(0, sequences, 3),
    )
    assert cases.faults(drawn, run(drawn, cases.Surroundings(padding=3)), CHUNK, EXACT) == []


def test_two_steps_are_one_long_step() -> None:
    drawn = step([40])
    whole = run(drawn)
    # the second half begins where the first one ends, in its slot
    first, second = (
        drawn.with_projections(*(tensor[rows] for tensor in drawn.projections), lengths=[rows.stop - rows.start])
        for rows in (slice(0, 16), slice(16, 40))
    )
    after = run(first)
    second = dataclasses.replace(second, conv=after.conv, state=after.state, prefixes=[80])
    again = run(second)
    slot = drawn.slots[0]
    # a step ends where a chunk does, and its state is kept in fp32
    assert cases.same_bits(again.output[:24], whole.output[16:40])
    assert cases.same_bits(again.state[slot], whole.state[slot])
    assert cases.same_bits(again.conv[slot], whole.conv[slot])


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
    launched.scratch.mixed = launched.scratch.mixed[:, :7]
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
    tuning = form.tuning_for(shape)
    few = {walk.part_of(shape): walk.most_sequences(shape) for walk in tuning.few}
    assert (form.tile_of(shape, tuning), tuning.many.part_of(shape), few) == PUBLISHED[shape]
    # B.C is computed once for all heads of a group where that was measured to pay
    assert tuning.relates is (shape.states == 256)
    assert shape.inner % form.tile_of(shape, tuning) == shape.states % form.tile_of(shape, tuning) == 0


def test_what_is_refused() -> None:
    nemotron = Shape(128, 8, 64, 128, 4)
    conv = torch.empty(2, nemotron.channels, 3, dtype=torch.bfloat16, device="meta")
    state = torch.empty(2, 128, 64, 128, device="meta")
    right: dict[str, Any] = {"kind": torch.bfloat16, "activation": "silu", "conv": conv, "state": state}
    assert refusal(nemotron, **right) is None
    assert refusal(nemotron, **{**right, "state": state[::2]}) is None
    assert refusal(nemotron, **{**right, "state": state.bfloat16()}) is None
    wrong: dict[str, tuple[Shape, dict[str, Any]]] = {
        "heads of 72": (dataclasses.replace(nemotron, head=72), {}),
        "96 states": (dataclasses.replace(nemotron, states=96), {}),
        "128 heads in 12 groups": (dataclasses.replace(nemotron, groups=12), {}),
        "a convolution of width 6": (dataclasses.replace(nemotron, width=6), {}),
        "the activation None": (nemotron, {"activation": None}),
        "projections in torch.float32": (nemotron, {"kind": torch.float32}),
        "windows in torch.float32": (nemotron, {"conv": conv.float()}),
        "windows of (10240, 4)": (nemotron, {"conv": torch.empty(2, 10240, 4, dtype=torch.bfloat16, device="meta")}),
        "states in torch.float16": (nemotron, {"state": state.half()}),
        "states of (128, 64, 64)": (nemotron, {"state": state[..., :64]}),
        "states with strides": (nemotron, {"state": torch.empty(2, 128, 128, 64, device="meta").transpose(2, 3)}),
    }
    for words, (shape, changed) in wrong.items():
        said = refusal(shape, **{**right, **changed})
        assert said is not None and said.startswith(f"no kernel for {words}"), said


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    return mutants.fates("tests.kernels.mamba2_extend_mutants", list(MUTANTS))


@pytest.mark.parametrize("case", sorted({case for case, _, _ in MUTANTS.values()}))
def test_what_mutants_are_held_against(case: str) -> None:
    assert faults(case, (form, metadata)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


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


def test_the_gpu_script_finds_faults_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "tuning_for", lambda shape: TUNING)
    source, found = random.Random(0), []
    for seed in range(3):
        drawn = mamba2_extend.draw(mamba2_extend.SMALL, source, 130, seed, "cpu")
        found += mamba2_extend.faults(drawn, random_steps.surroundings(drawn, source), capture=lambda work: work)
    assert found == []
    # a graph that was captured with the first step's tables alone
    forgotten = mamba2_extend.faults(drawn, cases.Surroundings(), capture=lambda work: lambda: None)
    assert any(fault.startswith("replayed: ") for fault in forgotten)
