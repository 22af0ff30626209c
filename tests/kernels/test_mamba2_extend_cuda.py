# SPDX-License-Identifier: Apache-2.0
"""The CUDA implementation of mamba2_extend: its source run on the host, compiled for Hopper, and its packing."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from benchmarks import mamba2_extend
from benchmarks.bench import gdn_layer, mamba2_layer
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.cuda import nvrtc
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.mamba2_extend import Shape, cuda, triton
from sglang_bcg_fixes.kernels.mamba2_extend.program import PROGRAM
from sglang_bcg_fixes.kernels.mamba2_extend.walks import Walk
from tests.kernels import accuracy, headers, linear_extend_cases, on_host
from tests.kernels import mamba2_extend_cases as cases
from tests.kernels.program_on_host import HOST, OnHost

ON_HOST = OnHost(cuda, PROGRAM)
SIGNATURES, DECLARED = ON_HOST.signatures, ON_HOST.declared()
SHAPE = Shape(heads=2, groups=1, head=64, states=128, width=4)
WIDE = Shape(heads=1, groups=1, head=128, states=256, width=4)
# of triton's kernels, where they take the place of ours
TUNING = triton.Tuning(Walk(2, 4, 1, 64), prepare_programs=3, relate_programs=3, strip=8)
EXACT = 0.001
# blocks that have several items, and one for each
FEW_BLOCKS, MANY_BLOCKS = 3, 64
ARCHITECTURE = "90a"


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ON_HOST.library(PROGRAM.file, tmp_path_factory.mktemp("on_host"), SIGNATURES)


@pytest.fixture(scope="session")
def kernels(right: ctypes.CDLL) -> cuda.Kernels:
    made: cuda.Kernels = ON_HOST.launched(dict.fromkeys(SIGNATURES, right))
    return made


@pytest.fixture(params=[FEW_BLOCKS, MANY_BLOCKS], ids=["few blocks", "many blocks"])
def host(kernels: cuda.Kernels, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> cuda.Kernels:
    chosen = dataclasses.replace(kernels, multiprocessors=request.param)
    monkeypatch.setattr(cuda, "on_device", lambda device: chosen)
    return chosen


def step(lengths: list[int], shape: Shape = SHAPE, **options: Any) -> cases.Step:
    return cases.draw(shape, lengths, device="cpu", **{"dtype": torch.float16, **options})


AROUND = cases.Surroundings(padding=70, more_tokens=9, max_sequences=8, columns_between=4)


def run(drawn: cases.Step, around: cases.Surroundings = AROUND, implementation: Any = cuda) -> cases.After:
    return cases.Launched(drawn, TUNING, around, modules=(implementation, metadata)).run()


def faults(drawn: cases.Step, around: cases.Surroundings = AROUND, tolerance: float = EXACT) -> list[str]:
    return cases.faults(drawn, run(drawn, around), tolerance=tolerance)


STEPS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one token": ([1], {}),
    "one chunk": ([64], {}),
    "more chunks than a ring has places": ([300], {}),
    "ends beside a chunk": ([63, 65, 130], {}),
    "nobody": ([0, 0], {}),
    "some have nothing, and some no slot": ([0, 70, 3, 64, 0, 5], {"gone": [1], "fresh": [2]}),
    "checkpoints": ([130, 64, 70, 3], {"tracked": {0: 129, 1: 64, 2: 10}, "fresh": [1]}),
    "gates near 0": ([100], {"gates": "near 0"}),
    "gates far below": ([100, 3], {"gates": "far below"}),
    "long steps": ([70], {"gates": "long steps"}),
    "weights in half precision": ([70, 3], {"of_weights": torch.float16}),
    "no bias": ([70, 3], {"bias": False}),
    "fewer tokens than taps, some with a checkpoint": ([1, 2, 2, 3, 1], {"fresh": [2], "tracked": {0: 1, 1: 1, 2: 2}}),
}


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["128 states", "256 states"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, shape: Shape, host: cuda.Kernels) -> None:
    lengths, options = STEPS[name]
    assert faults(step(lengths, shape, **options)) == []


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 64, 128, 4),
        Shape(4, 2, 64, 128, 4),
        Shape(3, 3, 128, 128, 4),
        Shape(2, 1, 192, 256, 4),
        Shape(9, 1, 64, 128, 4, least_step=0.05, most_step=0.2),
    ],
    ids=str,
)
def test_other_shapes(shape: Shape, host: cuda.Kernels) -> None:
    assert faults(step([70, 5], shape, fresh=[1])) == []


# a chunk; a sequence needs four such segments to be cut, and has at most eight
SEGMENT = 64
ONE_HEAD = dataclasses.replace(SHAPE, heads=1)
# 257 tokens are two chunks in each segment, and one token in the last; 580 two in each of five
CUT: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one": ([257], {}),
    "beside others": ([63, 530, 255, 5, 256], {"fresh": [1], "gone": [3]}),
    "fewer than eight, that none is empty": ([580], {}),
    "checkpoints at the end of a segment and inside": ([257, 330], {"tracked": {0: 128, 1: 200}, "gates": "near 0"}),
    "checkpoints at both ends": ([257, 320], {"tracked": {0: 10, 1: 320}}),
    "gates far below": ([260], {"gates": "far below"}),
}


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "segment_of", lambda *_: SEGMENT)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("shape", [ONE_HEAD, WIDE], ids=["128 states", "256 states"])
@pytest.mark.parametrize("name", CUT)
def test_sequences_that_are_cut(name: str, shape: Shape, host: cuda.Kernels) -> None:
    lengths, options = CUT[name]
    assert faults(step(lengths, shape, **options)) == []


@pytest.mark.usefixtures("segments")
def test_nothing_around_a_cut_sequence_changes_its_bits(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = step([70, 257, 330], ONE_HEAD, fresh=[1], tracked={2: 200}, dtype=torch.bfloat16)
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    together = run(drawn)
    many = dataclasses.replace(kernels, multiprocessors=MANY_BLOCKS)
    monkeypatch.setattr(cuda, "on_device", lambda device: many)
    assert cases.differences(together, run(drawn, cases.Surroundings()), drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


@pytest.mark.usefixtures("segments")
def test_what_is_not_a_number_stays_in_its_cut_sequence(host: cuda.Kernels) -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([260, 70, 257], ONE_HEAD), run)


def test_heads_and_length_decide_about_segments() -> None:
    tables = metadata.Tables(20000, 4, "cpu")
    shapes = {heads: dataclasses.replace(SHAPE, heads=heads) for heads in (16, 32, 48, 64, 65, 128)}
    found = {heads: cuda.segment_of(shape, tables) for heads, shape in shapes.items()}
    assert found == {16: 1024, 32: 1024, 48: 1024, 64: 1024, 65: 0, 128: 0}
    assert cuda.segment_of(dataclasses.replace(shapes[16], states=64), tables) == 0
    for rows, records, sequences in ((20000, 19, 4), (4095, 0, 0), (1023, 0, 0)):
        scratch = cuda.Scratch.for_rows(rows, tables, shapes[16], torch.bfloat16, TUNING)
        assert scratch.carries.shape == (records, 16, 64 * 129) and scratch.befores.shape == (sequences, 16, 64 * 128)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize(("rows", "kernels"), [(255, ["advance"]), (256, ["carry", "advance"])])
def test_only_an_output_of_enough_rows_is_cut(rows: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    run(step([rows]), cases.Surroundings())
    found = [kernel for kernel, *_ in launches]
    assert found == ["bcg_mamba2_prepare_f16", *(f"bcg_mamba2_{kernel}_128_f16" for kernel in kernels)]


def test_in_bfloat16(host: cuda.Kernels) -> None:
    # a few numbers: one of them may be rounded badly and be half of a result
    assert faults(step([3, 130], dtype=torch.bfloat16), tolerance=2 * accuracy.TOLERANCE) == []


def test_nothing_around_a_sequence_changes_its_bits(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = step([130, 70, 66, 1], fresh=[1], dtype=torch.bfloat16)
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    together = run(drawn)
    many = dataclasses.replace(kernels, multiprocessors=MANY_BLOCKS)
    monkeypatch.setattr(cuda, "on_device", lambda device: many)
    assert cases.differences(together, run(drawn, cases.Surroundings()), drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


def test_what_is_not_a_number_stays_in_its_sequence(host: cuda.Kernels) -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([70, 66, 9]), run)


def test_the_benchmark_calls_this_implementation_if_it_is_named(
    kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    problem = mamba2_layer.Problem(mamba2_layer.Shape(1, 1, 1), [3, 3], "cpu", "float16")
    problem.restore()
    call = mamba2_layer.calls_of_ours(problem, gdn_layer.CUDA)(0)
    call.launch()
    errors = problem.errors(problem.wanted())
    assert type(call) is cuda.Call and accuracy.why_wrong(errors, dict.fromkeys(errors, accuracy.TOLERANCE)) == ""


def test_random_steps_of_this_implementation_are_its_own_and_some_are_cut() -> None:
    source, shape = random.Random(0), Shape(1, 1, 64, 128, 4)
    drawn = [mamba2_extend.draw(shape, source, 9000, seed, "cpu", "cuda") for seed in range(12)]
    assert {each.state.dtype for each in drawn} == {torch.float32}
    assert 0 < sum(map(mamba2_extend.is_cut, drawn)) < len(drawn)


def test_random_steps_run_the_implementation_that_is_named(
    kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    monkeypatch.setattr(triton, "tuning_for", lambda shape: TUNING)

    def found() -> list[str]:
        return mamba2_extend.faults(step([5]), cases.Surroundings(), "cuda", capture=lambda work: work)

    # nothing is computed
    assert found() and launches
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    assert found() == []


def test_slots_an_odd_number_of_floats_apart_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    monkeypatch.setattr(linear_extend_cases, "between_slots", linear_extend_cases.floats_between_slots(1))
    assert faults(step([20, 3])) == [] and not launches


@pytest.mark.parametrize(
    ("shape", "around"),
    [(SHAPE, dataclasses.replace(AROUND, columns_between=3)), (dataclasses.replace(SHAPE, width=3), AROUND)],
    ids=["rows that are not aligned", "three taps"],
)
def test_what_our_prepare_cannot_read_is_prepared_by_triton(
    shape: Shape, around: cases.Surroundings, kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, launches = ON_HOST.recorded()
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(active, "leave_to_triton", lambda *given: said.append(given))
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    drawn = step([70, 3], shape, tracked={0: 66})
    run(drawn, around)
    assert [kernel for kernel, *_ in launches] == ["bcg_mamba2_advance_128_f16"]
    [(op, what)] = said
    assert op == "mamba2_extend" and what.startswith(f"prepare of {shape}, ")
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    assert faults(drawn, around) == []


@pytest.mark.parametrize("name", ["dt", "conv", "A"])
def test_numbers_of_another_type_are_prepared_by_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    drawn = step([5])
    other = dataclasses.replace(drawn, **{name: getattr(drawn, name).to(torch.bfloat16)})
    launched = cases.Launched(other, TUNING, AROUND, modules=(cuda, metadata))
    if name == "dt":
        # what is around a step has its dtype
        launched.inputs[1] = launched.inputs[1].float()
    launched.fill()
    launched.extend()
    assert [kernel for kernel, *_ in launches] == ["bcg_mamba2_advance_128_f16"]


def test_the_grid_and_the_parameters_follow_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare launches: what a graph keeps of one must not depend on the tensors' contents."""
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    launched = cases.Launched(step([70, 3, 64]), TUNING, AROUND, modules=(cuda, metadata))
    launched.fill()
    launched.extend()
    first = list(launches)
    launches.clear()
    launched.tables.counts.zero_()
    launched.tables.chunks.zero_()
    launched.tables.sequences.zero_()
    launched.extend()
    assert launches == first and len(first) == 2


def test_what_the_header_has_no_kernel_for_is_tritons_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(active, "leave_to_triton", lambda *given: said.append(given))
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    for shape, options in (
        (Shape(2, 1, 48, 128, 4), {}),
        (Shape(2, 1, 64, 64, 4), {}),
        (SHAPE, {"kept": torch.bfloat16}),
        (SHAPE, {"of_weights": torch.bfloat16}),
    ):
        drawn = step([20], shape, **options)
        after, by_triton = run(drawn), run(drawn, implementation=triton)
        assert cases.differences(after, by_triton, drawn.tokens) == [] and not launches
        [(op, what)] = said
        assert op == "mamba2_extend" and what.startswith(f"advance of {shape}, states in {drawn.state.dtype}")
        said.clear()
    run(step([20]))
    assert [kernel for kernel, *_ in launches] == ["bcg_mamba2_prepare_f16", "bcg_mamba2_advance_128_f16"]
    assert not said


# what is written instead of what
MUTANTS: dict[str, tuple[str, str]] = {
    "the ring never begins a new round": ("phase ^= 1;", ""),
    "a tile that is not swizzled": ("((piece ^ (row % 8)) * 16)", "piece * 16"),
    "an output behind the sequence": ("if (row < end) set_global", "set_global"),
    "an output of the producer's behind the sequence": ("if (in_chunk < rows) set_global", "set_global"),
    "an output that is left in the ring": ("kStores && stage < At::kStages", "kStores && stage < 1"),
    "a stage that is loaded before it is empty": (
        "mbarrier_wait(At::empty(memory, pipe.stage), pipe.phase ^ 1); #pragma unroll for (int step",
        "for (int step",
    ),
    "rows past the end that are read": (
        "const int row = at_most(first_row + in_chunk, item.end - 1); const int lies",
        "const int row = first_row + in_chunk; const int lies",
    ),
    "x past the end that is read": (
        "const int row = at_most(first_row + in_chunk, item.end - 1); const u16* const x",
        "const int row = first_row + in_chunk; const u16* const x",
    ),
    "the first tile of C for all": ("tiles + quarter * kTile", "tiles"),
    "the first half of B for both": ("kBTiles + 2 * half * kTile", "kBTiles"),
    "B of another group": ("i64(item.head / group) * job.capacity", "i64(0) * job.capacity"),
    "a checkpoint a chunk early": ("checkpoint == first_row + kChunk", "checkpoint == first_row"),
    "no checkpoint at the beginning": ("if (checkpoint == item.start && item.segment == 0)", "if (false)"),
    "a state that is not read": ("else if (item.has_prefix)", "else if (false)"),
    "a state that nobody has left": ("item.segments == 1 && item.has_prefix &&", "item.segments == 1 &&"),
    "half of an early state": ("four < kRows * kFours", "four < kRows / 2 * kFours"),
    "a state that forgets nothing": ("S[half][each] *= whole", "S[half][each] *= 1.0f"),
    "an output that forgets nothing": ("both[0] * kept[pair / 2].x", "both[0]"),
    "no way through": ("+ widened<kBf16>(u16(x[pair] >> 16)) * through", ""),
    "later tokens": ("column <= row ?", "true ?"),
    "not the token itself": ("column <= row ?", "column < row ?"),
    "weights without their steps": ("decay * (each % 2 ? of_step.y : of_step.x)", "decay"),
    "decays of the other row": ("(each / 2 % 2 ? lower : upper)", "upper"),
    "steps of another token": ("shared_float(gates + 4 * (kChunk + token))", "shared_float(gates + 4 * kChunk)"),
    "what another token has left": ("last - shared_float(gates + 4 * token)", "last - shared_float(gates)"),
    "x of other tokens": ("16 * step + lane / 16 * 8 + lane % 8", "lane / 16 * 8 + lane % 8"),
    "a stage that is weighed by half": ("(kIsCarry ? 1 : 2) * kGroup / kWarp", "kGroup / kWarp"),
    "W that is not fenced": ("// the walker has no fence of its own fence_proxy_async();", ""),
    "what is learnt and not fenced": (
        "tiles + At::kLearntTile); fence_proxy_async(); }",
        "tiles + At::kLearntTile); }",
    ),
    "tiles that are not fenced": ("fence_proxy_async(); wgmma_fence(); relate", "wgmma_fence(); relate"),
    "products that are not waited for": ("wgmma_wait<0>(products);", "wgmma_wait<1>();"),
    "an output that is not waited for": ("wgmma_wait<1>(o);", "wgmma_wait<2>();"),
    "a state that is not waited for": ("wait_for<1>(S);", "wgmma_wait<2>();"),
    "a quarter that is still multiplied": ("if (quarter > 1) wgmma_wait<1>();", ""),
    "sequences cut in two": ("most < kLeastSegments ? 1", "most < 2 ? 1"),
    "states come early that are not aligned": ("&& places % 16 == 0", ""),
    "an output that is rounded early": (
        "wgmma_wait<0>(o); round<kBf16>(right, o);",
        "round<kBf16>(right, o); wgmma_wait<0>(o);",
    ),
    "a stage that is given back early": (
        "wait_for<1>(S); round_quarter",
        "leave_stage(empty_before); wait_for<1>(S); round_quarter",
    ),
    "a state that stays as it was": (
        "store_state<kStates>(state_of<kStates>(job, again, again.slot), S);",
        "(void)again;",
    ),
    "the other half of a head": ("row = number % parts * kRows;", "row = 0;"),
    "a state of each segment": ("if (again.segment == again.segments - 1)", ""),
    "the first segment's state for all": ("if (item.segment == 0 && item.has_prefix)", "if (item.has_prefix)"),
    "no state before": ("store_state<kStates>(item.before_of(job, kStates) + item.row * kStates, S);", ""),
    "segments that forget nothing": ("left *= shared_float(decays + 4 * kChunk);", ""),
    "one segment is left out": ("number < item.segment; ++number", "number + 1 < item.segment; ++number"),
    "a segment that is not waited for": ("wait_for<0>(S); leave_stage", "leave_stage"),
    "segments of another head": ("+ number) * job.heads + head)", "+ number) * job.heads)"),
    "prepare: a window that stays as it was": ("store_window(job, own, after); }", "}"),
    "prepare: no checkpoint of a window": (
        "store_window(job, own + (chunk.track_slot - chunk.slot) * job.conv_slot, after);",
        "",
    ),
    "prepare: a window that is overwritten before it is read": (
        "window_before(window, job, chunk, channel, own, chunk.start); if (chunk.track_slot >= 0) {",
        "window_before(after, job, chunk, channel, own, chunk.end); store_window(job, own, after);"
        " window_before(window, job, chunk, channel, own, chunk.start); if (chunk.track_slot >= 0) {",
    ),
    "prepare: a window of nobody": ("} else if (chunk.has_window) {", "} else {"),
    "prepare: a window of another token": (
        "(kPast + row - chunk.start) * job.conv_past",
        "(kPast - 1) * job.conv_past",
    ),
    "prepare: a window's channel for its neighbour": (
        "found[past][each] = own[each * job.conv_channel",
        "found[past][each] = own[0",
    ),
    "prepare: one input for another": ("inputs[(number + tap) % kWidth]", "inputs[(number + tap + 1) % kWidth]"),
    "prepare: no inputs before a strip": ("four_at(x + i64(number - kPast) * job.x_row)", "make_int2(0, 0)"),
    "prepare: no bias": ("if (job.bias) widen", "if (false) widen"),
    "prepare: rows of the next sequence": ("if (first_row + number < chunk.end) { *rein", "if (true) { *rein"),
    "prepare: the first channels of a group for all": ("past_x % job.states", "0"),
    "prepare: the first group for all": ("past_x / job.states", "0"),
    "prepare: gates that begin anew": ("before + sum[1]", "sum[1]"),
    "prepare: gates of the head before": ("if (four == 0) before = 0;", ""),
    "prepare: gates of other tokens": ("if (four >= distance) total += before;", "total += before;"),
    "prepare: steps of the next sequence": ("is_head && first_row + each < chunk.end", "is_head"),
    "prepare: steps below the least": ("soft < job.least_step ? job.least_step : soft", "soft"),
    "prepare: steps above the most": ("enough > job.most_step ? job.most_step : enough", "enough"),
    "prepare: half a gate": ("job.flags & kFloatA) * kLog2E", "job.flags & kFloatA)"),
    "prepare: only eight heads": ("item % of_heads * kHeads", "0"),
    "prepare: an output that nobody writes": ("make_zeros(job, chunk.first_row, chunk.end, channel)", "(void)0"),
    "prepare: padding that nobody writes": (
        "if (channel < job.inner) make_zeros(job, tail + item / of_outputs * kChunk, job.rows_of_output, channel);",
        "(void)channel;",
    ),
}
OF_PREPARE = "prepare: "


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that every mutant is run on until one notices it, cut into segments of so many tokens or not at all."""

    draw: Callable[[], cases.Step]
    segment: int = 0
    blocks: tuple[int, ...] = (FEW_BLOCKS, MANY_BLOCKS)
    between_slots: Callable[[Any], Any] = linear_extend_cases.between_slots
    look: Callable[[cases.Step], list[str]] = faults


def spreads(drawn: cases.Step) -> list[str]:
    """Tell if what is not a number reaches another sequence."""
    try:
        linear_extend_cases.assert_nan_stays_in_its_sequence(drawn, run)
    except AssertionError as error:
        return [str(error) or "it does"]
    return []


GROUPS = functools.partial(step, [130, 70, 64, 3], Shape(2, 2, 64, 128, 4), tracked={0: 129, 2: 10}, gates="near 0")
# those that run fewest threads and kernels first: they notice most
CASES: dict[str, Case] = {
    "one head": Case(functools.partial(step, [130, 66, 3], ONE_HEAD, tracked={0: 64, 2: 0}, fresh=[1])),
    # each too short to be cut, and so near that they would share records
    "two that are not cut": Case(functools.partial(step, [130, 130], ONE_HEAD, gates="near 0"), SEGMENT),
    "hardly forgets": Case(functools.partial(step, [580], ONE_HEAD, gates="near 0"), SEGMENT),
    "more chunks than a ring has places": Case(functools.partial(step, [330, 66], fresh=[1])),
    "256 states": Case(functools.partial(step, [70, 130], WIDE, tracked={1: 64}, fresh=[0])),
    "groups": Case(GROUPS),
    "nine heads": Case(
        functools.partial(
            step, [2, 70, 20], Shape(9, 1, 64, 128, 4, least_step=0.05, most_step=0.2), gone=[2], tracked={0: 1, 1: 3}
        )
    ),
    # in five segments each, of two chunks
    "in segments": Case(functools.partial(step, [257, 580], tracked={0: 128}), SEGMENT),
    "not a number": Case(functools.partial(step, [70, 66, 9]), look=spreads),
    # states come early, but where they are not aligned
    "states that are not aligned": Case(
        GROUPS, blocks=(FEW_BLOCKS,), between_slots=linear_extend_cases.floats_between_slots(2)
    ),
}
# which case to begin with, where the first ones do not notice a mutant: a wrong name costs time and hides nothing
BEGIN_WITH = {
    "a state that nobody has left": "more chunks than a ring has places",
    "an output behind the sequence": "256 states",
    "sequences cut in two": "two that are not cut",
    "a stage that is loaded before it is empty": "hardly forgets",
    "a state of each segment": "hardly forgets",
    "the first segment's state for all": "hardly forgets",
    "no state before": "hardly forgets",
    "one segment is left out": "hardly forgets",
    "a segment that is not waited for": "hardly forgets",
    "segments that forget nothing": "in segments",
    "segments of another head": "in segments",
    "the first half of B for both": "256 states",
    "the other half of a head": "256 states",
    "a quarter that is still multiplied": "256 states",
    "B of another group": "groups",
    "half of an early state": "groups",
    "x past the end that is read": "not a number",
    "states come early that are not aligned": "states that are not aligned",
    "prepare: steps below the least": "nine heads",
    "prepare: steps above the most": "nine heads",
    "prepare: only eight heads": "nine heads",
    "prepare: an output that nobody writes": "nine heads",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_noticed(
    mutant: str, right: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what the cases run
    of_prepare = mutant.startswith(OF_PREPARE)
    of_cases = [each for each in OF_CASES if ("prepare" in each) == of_prepare]
    mutated = ON_HOST.mutated(right, headers.mutant(PROGRAM.file, *MUTANTS[mutant], tmp_path), tmp_path, of_cases)
    first = [BEGIN_WITH[mutant]] if mutant in BEGIN_WITH else []
    assert next(found_in(mutated, dict.fromkeys((*first, *CASES)), monkeypatch), None), f"nothing sees {mutant}"


OF_CASES = [each for each in SIGNATURES if each.endswith("_f16")]


def found_in(made: cuda.Kernels, names: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Faults that the cases find in these kernels."""
    for blocks, case in itertools.product((FEW_BLOCKS, MANY_BLOCKS), map(CASES.__getitem__, names)):
        if blocks in case.blocks:
            chosen = dataclasses.replace(made, multiprocessors=blocks)
            monkeypatch.setattr(cuda, "on_device", lambda device, chosen=chosen: chosen)
            monkeypatch.setattr(cuda, "segment_of", lambda *_, case=case: case.segment)
            monkeypatch.setattr(linear_extend_cases, "between_slots", case.between_slots)
            yield from headers.seen(functools.partial(case.look, case.draw()))


@pytest.mark.parametrize("is_mutated", [False, True], ids=["checked", "compiled as mutants are"])
def test_without_a_mistake_nothing_is_noticed(
    is_mutated: bool, kernels: cuda.Kernels, right: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ON_HOST.mutated(right, PROGRAM.file, tmp_path, OF_CASES) if is_mutated else kernels
    assert list(found_in(made, CASES, monkeypatch)) == []


def test_cases_to_begin_with_are_those_of_mutants() -> None:
    assert set(BEGIN_WITH) <= set(MUTANTS) and set(BEGIN_WITH.values()) <= set(CASES)


def test_every_kernel_of_the_header_is_launched() -> None:
    assert sorted(PROGRAM.kernels) == sorted(SIGNATURES) == sorted(DECLARED)


@pytest.mark.parametrize("kernel", PROGRAM.kernels)
def test_the_packing_is_the_headers_struct(kernel: str) -> None:
    _, name = SIGNATURES[kernel]
    headers.assert_packs(DECLARED[kernel].layout, PROGRAM.file, name)


def test_the_constants_are_the_headers(tmp_path: pathlib.Path) -> None:
    needed = {"CHUNK", "SEQUENCE_FIELDS", "ROWS", "THREADS", "LEAST_SEGMENTS", "TRACKING", "FLOAT_D"}
    ON_HOST.assert_constants((metadata, cuda), needed, tmp_path)


@pytest.mark.parametrize("states", cuda.SHARED_BYTES)
def test_shared_memory_is_the_headers(states: int, tmp_path: pathlib.Path) -> None:
    check = f'static_assert(bcg::Layout<{states}>::kSharedBytes == {cuda.SHARED_BYTES[states]}, "");'
    on_host.assert_compiles([f'#include "{HOST}"', f'#include "{PROGRAM.file}"', check], tmp_path)


def test_nvcc_compiles_it_well(tmp_path: pathlib.Path) -> None:
    headers.assert_compiled_well(PROGRAM, headers.nvcc_log(PROGRAM.file, ARCHITECTURE, tmp_path))


def test_nvrtc_compiles_it_well(nvrtc_13: nvrtc.Compiler) -> None:
    headers.assert_compiled_well(PROGRAM, headers.nvrtc_log(PROGRAM.source(), PROGRAM.header, ARCHITECTURE, nvrtc_13))
