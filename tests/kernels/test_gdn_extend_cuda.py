# SPDX-License-Identifier: Apache-2.0
"""The CUDA implementation of gdn_extend: its source run on the host, compiled for Hopper, and its packing."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from benchmarks import gdn_extend
from benchmarks.bench import gdn_layer
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.cuda import nvrtc
from sglang_bcg_fixes.kernels.gdn_extend import Shape, cuda, triton
from sglang_bcg_fixes.kernels.gdn_extend.program import PROGRAM
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.model import Rejected
from tests.kernels import accuracy, headers, linear_extend_cases
from tests.kernels import gdn_extend_cases as cases
from tests.kernels.gdn_extend_on_host import FEW_BLOCKS, ON_HOST, SIGNATURES, launched, library

SHAPE = Shape(key_heads=1, value_heads=2, keys=128, values=128, width=4)
# of triton's kernels, where they take the place of ours
TUNING = cuda.Tuning(prepare_programs=3, advance_programs=2, strip=8)
IMPLEMENTATION = (cuda, metadata)
EXACT = 0.001
# FEW_BLOCKS are so few that a block has two parts of a head, and several of them; these are one for each half of a head
MANY_BLOCKS = 64
ARCHITECTURE = "90a"


DECLARED = ON_HOST.declared()


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library(PROGRAM.file, tmp_path_factory.mktemp("on_host"), SIGNATURES)


@pytest.fixture(scope="session")
def kernels(right: ctypes.CDLL) -> cuda.Kernels:
    made: cuda.Kernels = launched(dict.fromkeys(SIGNATURES, right))
    return made


@pytest.fixture(params=[FEW_BLOCKS, MANY_BLOCKS], ids=["two parts", "one part"])
def host(kernels: cuda.Kernels, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> cuda.Kernels:
    chosen = dataclasses.replace(kernels, multiprocessors=request.param)
    monkeypatch.setattr(cuda, "on_device", lambda device: chosen)
    return chosen


def step(lengths: list[int], shape: Shape = SHAPE, **options: Any) -> cases.Step:
    return cases.draw(shape, lengths, device="cpu", **{"dtype": torch.float16, **options})


AROUND = cases.Surroundings(padding=70, more_tokens=9, max_sequences=8, columns_between=8)


def run(drawn: cases.Step, around: cases.Surroundings = AROUND, implementation: Any = cuda) -> cases.After:
    return cases.Launched(drawn, TUNING, around, modules=(implementation, metadata)).run()


def faults(drawn: cases.Step, around: cases.Surroundings = AROUND, tolerance: float = EXACT) -> list[str]:
    return cases.faults(drawn, run(drawn, around), tolerance=tolerance)


@pytest.mark.parametrize("lengths", [[1], [64], [300], [63, 65, 130]], ids=str)
def test_against_the_reference(lengths: list[int], host: cuda.Kernels) -> None:
    assert faults(step(lengths), cases.Surroundings()) == []


STEPS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "nobody": ([0, 0], {}),
    "some have nothing, and some no slot": ([0, 70, 3, 64, 0, 5], {"gone": [1], "fresh": [2]}),
    "checkpoints": ([130, 64, 70, 3], {"tracked": {0: 129, 1: 64, 2: 10}, "fresh": [1]}),
    "shorter than the window, with bias": ([1, 2, 3], {"fresh": [2], "bias": True}),
    "gates near 0": ([100], {"gates": "near 0"}),
    "gates far below": ([100, 3], {"gates": "far below"}),
    "keys alike": ([100], {"equal_keys": True, "gates": "near 0"}),
}


@pytest.mark.parametrize("span", [None, 64, 128])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, span: int | None, host: cuda.Kernels) -> None:
    lengths, options = STEPS[name]
    assert faults(step(lengths, **options), dataclasses.replace(AROUND, span=span)) == []


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 2), (2, 4), (2, 6), (2, 8), (4, 8)], ids=str)
def test_other_numbers_of_heads(heads: tuple[int, int], host: cuda.Kernels) -> None:
    assert faults(step([70, 5], Shape(*heads, 128, 128, 4), fresh=[1])) == []


@pytest.mark.parametrize(("heads", "ranks"), [((8, 16), 4), ((2, 8), 2), ((3, 9), 3), ((4, 4), 2)], ids=str)
def test_a_rank_has_the_bits_of_its_heads_in_the_whole_layer(
    heads: tuple[int, int], ranks: int, kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    whole = step([66, 2], Shape(*heads, 128, 128, 4), fresh=[1], tracked={0: 65}, bias=True)
    after = run(whole)
    for number in {0, ranks - 1}:
        own, of_rank = run(whole.rank(number, ranks)), cases.after_of_rank(after, number, ranks, whole.shape)
        assert cases.differences(own, of_rank, len(own.output)) == []


# two chunks; a sequence needs four such segments to be cut
SEGMENT = 128
ONE_HEAD = dataclasses.replace(SHAPE, value_heads=1)
# the last segment of a sequence of 385 is one token
CUT: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one": ([385], {}),
    "beside others": ([63, 530, 384, 5, 385], {"fresh": [1], "gone": [3]}),
    "checkpoints at the end of a segment and inside": ([385, 400], {"tracked": {0: 128, 1: 200}, "gates": "near 0"}),
    "checkpoints at both ends": ([385, 448], {"tracked": {0: 10, 1: 448}}),
    "gates far below": ([390], {"gates": "far below"}),
    "keys alike": ([390], {"equal_keys": True, "gates": "near 0"}),
}


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "segment_of", lambda *_: SEGMENT)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("name", CUT)
def test_sequences_that_are_cut(name: str, host: cuda.Kernels) -> None:
    lengths, options = CUT[name]
    assert faults(step(lengths, ONE_HEAD, **options)) == []


@pytest.mark.usefixtures("segments")
def test_cut_in_bfloat16_with_more_heads(host: cuda.Kernels) -> None:
    drawn = step([385, 70], Shape(2, 4, 128, 128, 4), dtype=torch.bfloat16)
    assert faults(drawn, tolerance=2 * accuracy.TOLERANCE) == []


def lost_from_a_state() -> list[str]:
    """Tell if segments lose any of a state that nothing is learnt into; it is split in two halves for that."""
    drawn = step([390], ONE_HEAD, gates="near 0")
    drawn = dataclasses.replace(drawn, b=torch.full_like(drawn.b, -30.0))
    lost = cases.of_each_head(drawn, run(drawn, cases.Surroundings()))["state"].max()
    return [f"the state is off by {lost:.6f}"] if lost > 2e-5 else []


@pytest.mark.usefixtures("segments")
def test_nothing_of_a_state_is_lost_between_segments(host: cuda.Kernels) -> None:
    assert lost_from_a_state() == []


@pytest.mark.usefixtures("segments")
def test_nothing_around_a_cut_sequence_changes_its_bits(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = step([70, 385, 450], ONE_HEAD, fresh=[1], tracked={2: 200}, dtype=torch.bfloat16)
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    together = run(drawn)
    many = dataclasses.replace(kernels, multiprocessors=MANY_BLOCKS)
    monkeypatch.setattr(cuda, "on_device", lambda device: many)
    assert cases.differences(together, run(drawn, cases.Surroundings()), drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


@pytest.mark.usefixtures("segments")
def test_what_is_not_a_number_stays_in_its_cut_sequence(host: cuda.Kernels) -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([390, 70, 385], ONE_HEAD), run)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_segments_do_not_overflow_where_the_sequence_does_not(
    kind: torch.dtype, host: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Share one direction among 64 keys: a state that begins with zeros learns it from each, past all of float16.

    The sequence's own state knows every value already, and stays as it is.
    """
    monkeypatch.setattr(cuda, "SEGMENTS", ((ONE_HEAD.value_heads, SEGMENT),))
    value, shared, own = 30000.0, 1.5, 10.0
    drawn = step([390], ONE_HEAD, gates="near 0", dtype=kind)
    weights, mixed_qkv = torch.zeros_like(drawn.conv_weights), torch.zeros_like(drawn.mixed_qkv)
    weights[:, -1] = 1
    queries, keys, values = mixed_qkv.split(128, 1)
    for each in (queries, keys):
        each[:, 0] = shared
        each[torch.arange(390), 1 + torch.arange(390) % 64] = own
    values[:] = value
    key = torch.nn.functional.silu(torch.tensor([shared, own]))
    known = float(value / (key / key.norm()).sum())
    drawn = dataclasses.replace(
        drawn,
        mixed_qkv=mixed_qkv,
        b=torch.full_like(drawn.b, 12.0),
        conv_weights=weights,
        A_log=torch.full_like(drawn.A_log, -30.0),
        state=torch.where(drawn.state.isnan(), drawn.state, known),
    )
    assert faults(drawn, tolerance=accuracy.TOLERANCE) == []


def test_the_length_and_the_heads_decide_about_segments() -> None:
    tables = metadata.Tables(20000, 4, "cpu")
    in_spans = metadata.Tables(20000, 4, "cpu", span=8192)
    shapes = {heads: dataclasses.replace(SHAPE, value_heads=heads) for heads in (4, 8, 12, 16, 24, 32)}
    kind = torch.bfloat16
    found = {heads: cuda.segment_of(shape, tables, kind) for heads, shape in shapes.items()}
    assert found == {4: 1024, 8: 1024, 12: 2048, 16: 2048, 24: 0, 32: 0}
    assert cuda.segment_of(shapes[4], in_spans, kind) == 0
    assert cuda.segment_of(dataclasses.replace(shapes[4], keys=64), tables, kind) == 0
    for rows, records in ((20000, 19), (1023, 0)):
        scratch = cuda.Scratch.for_rows(rows, tables, shapes[4], kind, TUNING)
        assert scratch.carries.shape == (records, 4, cuda.CARRY_SIZE)


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize(("rows", "kernels"), [(384, ["advance"]), (385, ["carry", "advance_segments"])])
def test_only_an_output_of_enough_rows_is_cut(rows: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    run(step([rows]), cases.Surroundings())
    assert [kernel for kernel, *_ in launches] == [f"bcg_gdn_{kernel}_f16" for kernel in ("prepare", *kernels)]


def test_in_bfloat16(host: cuda.Kernels) -> None:
    # a few numbers: one of them may be rounded badly and be half of a result
    assert faults(step([3, 130], dtype=torch.bfloat16), tolerance=2 * accuracy.TOLERANCE) == []


def test_heads_that_hardly_forget_are_held_against_fp64(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    found = gdn_extend.hardly_forget(130, cuda, "cpu", seeds=2)
    assert all(0.001 < each["median"] <= each["worst"] < accuracy.TOLERANCE for each in found.values()), found
    step = cases.draw(SHAPE, [3, 3], device="cpu", dtype=torch.float16, gates="near 0")
    after = run(step, cases.Surroundings())
    after.output[3, 1] = float("nan")
    after.state[step.slots[0], 0] *= 1.5
    heads = cases.of_each_head(step, after)
    # by sequence, then by head
    assert heads["output"].isnan().tolist() == [False, False, False, True]
    assert [round(each, 2) for each in heads["state"].tolist()] == [0.5, 0, 0, 0]


def test_the_benchmark_calls_this_implementation_if_it_is_named(
    kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    problem = gdn_layer.Problem(gdn_layer.Shape(1, 1, 1), [3, 3], "cpu")
    problem.restore()
    call = gdn_layer.calls_of_ours(problem, gdn_layer.CUDA)(0)
    call.launch()
    errors = problem.errors(problem.wanted())
    assert type(call) is cuda.Call and accuracy.why_wrong(errors, dict.fromkeys(errors, accuracy.TOLERANCE)) == ""


def test_weights_of_gates_in_either_type(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "on_device", lambda device: kernels)
    drawn = step([70])
    drawn = dataclasses.replace(drawn, A_log=drawn.A_log.half(), dt_bias=drawn.dt_bias.half())
    other = dataclasses.replace(drawn, A_log=drawn.A_log.float(), dt_bias=drawn.dt_bias.float())
    assert faults(drawn) == []
    assert cases.differences(run(drawn), run(other), drawn.tokens) == []


def test_nothing_around_a_sequence_changes_its_bits(kernels: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {blocks: dataclasses.replace(kernels, multiprocessors=blocks) for blocks in (FEW_BLOCKS, MANY_BLOCKS)}
    drawn = step([70, 7, 200, 1], fresh=[1], dtype=torch.bfloat16)
    monkeypatch.setattr(cuda, "on_device", lambda device: chosen[FEW_BLOCKS])
    together = run(drawn)
    in_spans = run(drawn, dataclasses.replace(AROUND, span=64))
    monkeypatch.setattr(cuda, "on_device", lambda device: chosen[MANY_BLOCKS])
    bare = run(drawn, cases.Surroundings())
    assert cases.differences(together, in_spans, drawn.tokens) == []
    assert cases.differences(together, bare, drawn.tokens) == []
    linear_extend_cases.assert_neighbours_change_nothing(drawn, together, run)


def test_what_is_not_a_number_stays_in_its_sequence(host: cuda.Kernels) -> None:
    linear_extend_cases.assert_nan_stays_in_its_sequence(step([20, 70, 9]), run)


def test_states_in_bfloat16_are_tritons_behind_our_prepare(host: cuda.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        pytest.fail("it takes its states in fp32")

    kinds = dict.fromkeys(cuda.KINDS, fail)
    only_prepare = dataclasses.replace(host, advance=kinds, carry=kinds, advance_segments=kinds)
    monkeypatch.setattr(cuda, "on_device", lambda device: only_prepare)
    drawn = step([130, 70, 3, 64], tracked={0: 129}, fresh=[1], gone=[2], kept=torch.bfloat16)
    # in bfloat16 a checkpoint and a state are rounded by 0.0017
    assert faults(drawn, tolerance=0.002) == []
    assert faults(drawn, tolerance=EXACT) != []


def test_other_sizes_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(active, "leave_to_triton", lambda op, what: said.append(what.split()[0]))
    monkeypatch.setattr(cuda, "on_device", lambda device: pytest.fail("a kernel of ours is launched"))
    for shape, chunk in ((Shape(1, 2, 16, 16, 4), 64), (Shape(1, 1, 128, 128, 4), 16)):
        drawn = step([18, 5], shape)
        ours, theirs = (cases.Launched(drawn, TUNING, AROUND, chunk, (each, metadata)).run() for each in (cuda, triton))
        assert cases.differences(ours, theirs, drawn.tokens) == []
        assert set(said) == {"prepare", "advance"}
        said.clear()


def test_what_a_kernel_cannot_read_is_tritons_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(active, "leave_to_triton", lambda *given: said.append(given))
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    for drawn, around in (
        (step([5]), dataclasses.replace(AROUND, columns_between=3)),
        (step([5], dataclasses.replace(SHAPE, width=3)), AROUND),
    ):
        launches.clear()
        said.clear()
        run(drawn, around)
        assert [kernel for kernel, *_ in launches] == ["bcg_gdn_advance_f16"]
        assert set(said) == {("gdn_extend", f"prepare of {drawn.shape}")}


@pytest.mark.parametrize("place", [1, 2], ids=["a", "b"])
def test_gates_of_another_type_are_prepared_by_triton(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    launched = cases.Launched(step([5]), TUNING, AROUND, modules=IMPLEMENTATION)
    launched.inputs[place] = launched.inputs[place].float()
    launched.fill()
    launched.extend()
    assert [kernel for kernel, *_ in launches] == ["bcg_gdn_advance_f16"]


def test_the_grid_and_the_parameters_follow_from_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare launches: what a graph keeps of one must not depend on the tensors' contents."""
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    launched = cases.Launched(step([70, 3, 64]), TUNING, dataclasses.replace(AROUND, span=64), modules=IMPLEMENTATION)
    launched.fill()
    launched.extend()
    first = list(launches)
    launches.clear()
    nothing = torch.zeros(1, dtype=torch.int32)
    launched.tables.fill(nothing, nothing, nothing)
    for tensor in (*launched.inputs, launched.conv, launched.state, launched.output):
        tensor.zero_()
    launched.extend()
    assert first == launches
    # two launches for each span of 64 tokens
    assert [kernel for kernel, *_ in first] == ["bcg_gdn_prepare_f16", "bcg_gdn_advance_f16"] * 4


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_chips_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = cuda.ready(0)
    assert isinstance(answer, Rejected) and f"this is an sm_{capability[0]}{capability[1]}" in answer.reason


# one mistake each that a reviewer could overlook; those that read or write elsewhere would end this process
MUTANTS = {
    "advance: a warp is not waited for": (
        "mbarrier_init(cut.empty(stage), cut.parts * (kGroup / kWarp))",
        "mbarrier_init(cut.empty(stage), cut.parts * (kGroup / kWarp) - 1)",
    ),
    "advance: a warp too many is waited for": (
        "mbarrier_init(cut.empty(stage), cut.parts * (kGroup / kWarp))",
        "mbarrier_init(cut.empty(stage), cut.parts * (kGroup / kWarp) + 1)",
    ),
    "advance: a chunk is read before it is there": ("mbarrier_wait(cut.full(pipe.stage), pipe.phase);", ""),
    "advance: a chunk is overwritten while it is read": ("mbarrier_wait(cut.empty(pipe.stage), pipe.phase ^ 1);", ""),
    "advance: a place is given back early": (
        "leave_output(right, tiles_before + of_values);",
        "leave_stage(empty_before); leave_output(right, tiles_before + of_values);",
    ),
    "advance: an output that the producer forgets": ("outputs.store_oldest(job, tiles + kValueTiles);", ""),
    "advance: the last outputs": (
        "outputs.store_oldest(job, cut.tiles(pipe.stage) + kValueTiles); outputs.add(0, 0, 0); pipe.advance(kStages",
        "outputs.add(0, 0, 0); pipe.advance(kStages",
    ),
    "advance: the output of the stage before": (
        "shared_piece(tile + swizzled(first",
        "shared_piece(tile - 7 * kTile + swizzled(first",
    ),
    "advance: the ring never begins a new round": ("phase ^= 1;", ""),
    "advance: a tile where another one is": ("kScoreTile = 5 * kTile", "kScoreTile = 4 * kTile"),
    "advance: the keys' second half is the first": ("further(all, step / 4 * (kTile / 16) +", "further(all,"),
    "advance: a tile that is not swizzled": ("((piece ^ (row % 8)) * 16)", "piece * 16"),
    "advance: an output behind the sequence": ("if (row < end) set_global", "set_global"),
    "advance: an output of the producer's behind the sequence": (
        "if (in_chunk < rows) set_global",
        "if (in_chunk <= rows) set_global",
    ),
    "advance: rows past the end that are read": ("at_most(first_row + in_chunk, item.end - 1)", "first_row + in_chunk"),
    "advance: a checkpoint a chunk early": ("item.checkpoint == first_row + kChunk", "item.checkpoint == first_row"),
    "advance: no checkpoint at the end": ("item.checkpoint == item.stop", "false"),
    "advance: a state that forgets nothing": ("scale(S, shared_float(decays + 8 * kChunk));", ""),
    "advance: the decays of another thread's tokens": (
        "load_decays(minus, decays + 4 * own_column);",
        "load_decays(minus, decays);",
    ),
    "advance: a product that is not waited for": ("wgmma_wait<0>(o, n);", "wgmma_wait<1>();"),
    "advance: an accumulator that is still in flight": ("wgmma_wait<1>(n);", "wgmma_wait<1>(n, o);"),
    "advance: half of the queries looked up twice": (
        "look_up<kBf16, kLookUpSteps / 2>(o,",
        "look_up<kBf16, 0, kLookUpSteps / 2>(o,",
    ),
    "advance: an output that is rounded early": (
        "wgmma_wait<0>(o, n); round<kBf16>(right, o);",
        "round<kBf16>(right, o); wgmma_wait<0>(o, n);",
    ),
    "advance: a first chunk that is not fenced": (
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); fence_proxy_async(); wgmma_fence();",
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); wgmma_fence();",
    ),
    "advance: a chunk that is not fenced": ("fence_proxy_async(); wgmma_wait<0>(o, S);", "wgmma_wait<0>(o, S);"),
    "advance: a chunk that is fenced before it is there": (
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); fence_proxy_async(); wgmma_wait<0>(o, S);",
        "fence_proxy_async(); mbarrier_wait(cut.full(pipe.stage), pipe.phase); wgmma_wait<0>(o, S);",
    ),
    "advance: an early state of the other half": (
        "take_state(S, cut, own_part * kPart + own_row",
        "take_state(S, cut, own_row",
    ),
    "advance: half of an early state": ("four < kValues * kFours", "four < kPart * kFours"),
    "carry: M where B is": ("is_map = kKernel == kCarry && share > 0 && share % 2 == 0;", "is_map = false;"),
    "carry: the state before is not kept": ("store_state(carried + kStateSize + in_head, S);", ""),
    "carry: a segment too many": ("begin = start + segment * tokens;", "begin = start;"),
    "carry: rows of the identity of another part": (
        "part * kPart + own_row + each / 2 % 2 * 8, column",
        "own_row + each / 2 % 2 * 8, column",
    ),
    "carry: what the rounding of M drops": (
        "*reinterpret_cast<u32*>(to + kMapBytes) = rest[pair];",
        "*reinterpret_cast<u32*>(to + kMapBytes) = 0;",
    ),
    "carry: values that are not waited for": ("wgmma_wait<0>(known, n);", "wgmma_wait<1>();"),
    "carry: n of the chunk before": ("kAdds || step > 0", "true"),
    "carry: a chunk that is not fenced": (
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); fence_proxy_async(); } wgmma_wait<0>(S);",
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); } wgmma_wait<0>(S);",
    ),
    "carry: a stage that is given back early": (
        "wgmma_wait<0>(S); leave_stage(empty);",
        "leave_stage(empty); wgmma_wait<0>(S);",
    ),
    "advance_segments: a segment that begins with the slot's state": (
        "load_state(S, item.carry_of(job, 0) + kStateSize + in_head);",
        "load_state(S, state);",
    ),
    "advance_segments: one segment is left out": ("before < item.segment;", "before + 1 < item.segment;"),
    "advance_segments: B is left out": ("load_state(S, B);", "for (int each = 0; each < 64; ++each) S[each] = 0;"),
    "advance_segments: what the rounding of S drops": ("if (rounding == 0) add_mapped<kBf16>(S, rest, tiles);", ""),
    "advance_segments: what the rounding of M drops": ("+ number % 2 * kMapBytes", ""),
    "advance_segments: the columns of M for its rows": ("step / 4 * (2 * kTile / 16)", "step / 4 * (kTile / 16)"),
    "advance_segments: M that is not fenced": (
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); fence_proxy_async(); wgmma_fence(); add_mapped",
        "mbarrier_wait(cut.full(pipe.stage), pipe.phase); wgmma_fence(); add_mapped",
    ),
    "advance_segments: a state of each segment": ("if (is_last) store_state(state, S);", "store_state(state, S);"),
    "prepare: tiles that are not fenced": (
        "fence_proxy_async(); __syncthreads(); float kk[32]",
        "__syncthreads(); float kk[32]",
    ),
    "prepare: inverses that are not fenced": (
        "fence_proxy_async(); __syncthreads(); join_halves",
        "__syncthreads(); join_halves",
    ),
    "prepare: a window that stays as it was": ("own[past * job.conv_past] = after[past];", ""),
    "prepare: one input for another": ("inputs[(number + each) % kWidth]", "inputs[(number + each + 1) % kWidth]"),
    "prepare: inputs that are not waited for": ("cp_async_wait_all(); __syncthreads();", "__syncthreads();"),
    "prepare: inputs that other threads still copy": ("cp_async_wait_all(); __syncthreads();", "cp_async_wait_all();"),
    "prepare: inputs that are replaced before all have read": ("if (kIsNormed) __syncthreads();", ""),
    "prepare: no inputs before a chunk": ("past < kPast && chunk.first_row > chunk.start", "false"),
    "prepare: inputs behind the sequence": ("job.x_row, row < chunk.end);", "job.x_row, true);"),
    "prepare: a row too far in the scratch": (
        "to + down * kChunk, shared_piece",
        "to + (down + 1) * kChunk, shared_piece",
    ),
    "prepare: rows of the next sequence": (
        "set_global_if(down < count, to + down * kKeys",
        "set_global_if(true, to + down * kKeys",
    ),
    "prepare: values of the next sequence": ("set_global_if(in_strip < count", "set_global_if(true"),
    "prepare: gates that begin anew in the middle": ("if (token >= kWarp) sum = first_half + sum;", ""),
    "prepare: what is written before all have read": ("// all blocks and P have been read __syncthreads();", ""),
    "prepare: a later token in the past": ("column + 1 <= row", "column <= row"),
    "prepare: two eights of a row changed for each other": (
        "swizzled(own_thread() % 16, own_thread() % kWarp / 16)",
        "swizzled(own_thread() % 16, 1 - own_thread() % kWarp / 16)",
    ),
    "prepare: the upper rows of a block twice": ("^ (32 * lower)", ""),
    "prepare: an eight of a block where the first one is": ("in_own_block + 8 * right * 4 * kBlock", "in_own_block"),
    "prepare: a block where another one is": ("block_at(below, 0, 3)", "block_at(below, 0, 2)"),
    "prepare: scores of later tokens": ("stmatrix_x4(block_at(scores, warp, block), 0, 0, 0, 0);", ""),
    "prepare: no zeros above a block of the inverse": (
        "if (block % 2 == 1) set_shared(inverse + swizzled(column, 2 * (block - 1) + eight), zeros);",
        "",
    ),
    "prepare: no zeros above a block of T": ("stmatrix_x4(in_own_half(T, half, 0, 1), 0, 0, 0, 0);", ""),
    "prepare: no zeros above half of T": ("stmatrix_x4(block_at(T, half, 2 + block), 0, 0, 0, 0);", ""),
    "prepare: columns that other lanes still write": ("__syncwarp(); const u32 given", "const u32 given"),
    "prepare: tiles that products still read": ("// the tiles are written next __syncthreads();", ""),
    "prepare: blocks that other warps still write": (
        "weigh<kBf16>(kk, qk, member, memory); __syncthreads();",
        "weigh<kBf16>(kk, qk, member, memory);",
    ),
    "prepare: rows of T that other warps still write": (
        "invert<kBf16>(memory); __syncthreads();",
        "invert<kBf16>(memory);",
    ),
    "prepare: inputs where the values before still are": (
        "// the next item reuses the inputs' place __syncthreads();",
        "",
    ),
    "prepare: no keys for the next kernel": ("store_tiles(chunk, job.keys + of_head, keys);", ""),
    "prepare: the wrong sign below a block": ("halves<false>(-pair[0], -pair[1])", "halves<false>(pair[0], pair[1])"),
    "prepare: the wrong sign below a half": (
        "halves<false>(-product[member][2 * pair], -product",
        "halves<false>(product[member][2 * pair], product",
    ),
    "prepare: the gain of another head in a half": (
        "gains + 4 * (member * kChunk + 2 * (own_thread() % 4))",
        "gains + 4 * (2 * (own_thread() % 4))",
    ),
    "prepare: the gain of another head below a half": (
        "kGainsAt + 4 * (member * kChunk + 2 * (lane % 4))",
        "kGainsAt + 4 * (2 * (lane % 4))",
    ),
    "prepare: the gain of another token": ("4 * (half * kHalf + part / 2 * 8)", "4 * (part / 2 * 8)"),
}
# of one head, which takes half as long as two and notices most; it, too, has more chunks than the ring has places
SHORT = functools.partial(step, [330, 64], ONE_HEAD, tracked={0: 129, 1: 64}, fresh=[1])
LONG = functools.partial(step, [330])
TRACKED = functools.partial(step, [130, 70, 64, 3], tracked={0: 129, 2: 64}, gates="near 0", fresh=[2])
# seven chunks in four segments, the end of the second of which is kept
IN_SEGMENTS = functools.partial(step, [390, 70], ONE_HEAD, tracked={0: 256}, gates="near 0")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_noticed(
    mutant: str, right: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the kernel that the cases run
    kernel = f"bcg_gdn_{mutant.partition(':')[0]}_f16"
    mutated = ON_HOST.mutated(right, headers.mutant(PROGRAM.file, *MUTANTS[mutant], tmp_path), tmp_path, [kernel])
    draws = [IN_SEGMENTS] if kernel in OF_SEGMENTS else [SHORT, TRACKED, LONG]
    assert next(found_in(mutated, draws, monkeypatch), None), f"nothing sees {mutant}"


OF_SEGMENTS = ("bcg_gdn_carry_f16", "bcg_gdn_advance_segments_f16")


def found_in(
    made: cuda.Kernels, draws: Sequence[Callable[[], cases.Step]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Faults that the cases find in these kernels."""
    for blocks in (FEW_BLOCKS, MANY_BLOCKS):
        chosen = dataclasses.replace(made, multiprocessors=blocks)
        monkeypatch.setattr(cuda, "on_device", lambda device, chosen=chosen: chosen)
        for draw in draws:
            segment = SEGMENT if draw is IN_SEGMENTS else 0
            monkeypatch.setattr(cuda, "segment_of", lambda *_, segment=segment: segment)
            yield from headers.seen(functools.partial(faults, draw()))
            if draw is IN_SEGMENTS:
                yield from headers.seen(lost_from_a_state)


@pytest.mark.parametrize("is_mutated", [False, True], ids=["checked", "compiled as mutants are"])
def test_without_a_mistake_nothing_is_noticed(
    is_mutated: bool, kernels: cuda.Kernels, right: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ON_HOST.mutated(right, PROGRAM.file, tmp_path, SIGNATURES) if is_mutated else kernels
    assert list(found_in(made, [SHORT, TRACKED, LONG, IN_SEGMENTS], monkeypatch)) == []


def test_slots_an_odd_number_of_floats_apart_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    made, launches = ON_HOST.recorded()
    monkeypatch.setattr(cuda, "on_device", lambda device: made)
    for floats, advances in ((1, False), (2, True)):
        monkeypatch.setattr(linear_extend_cases, "between_slots", linear_extend_cases.floats_between_slots(floats))
        launches.clear()
        run(step([5]))
        assert any("advance" in kernel for kernel, *_ in launches) is advances


def test_states_that_are_not_aligned_do_not_come_early(
    kernels: cuda.Kernels, right: ctypes.CDLL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_extend_cases, "between_slots", linear_extend_cases.floats_between_slots(2))
    kernel = "bcg_gdn_advance_f16"
    always = headers.mutant(PROGRAM.file, "&& places % 16 == 0", "", tmp_path)
    mutated = ON_HOST.mutated(right, always, tmp_path, [kernel])
    assert list(found_in(kernels, [TRACKED, LONG], monkeypatch)) == []
    assert "a misaligned copy" in next(found_in(mutated, [TRACKED, LONG], monkeypatch))


def test_every_kernel_of_the_header_is_launched() -> None:
    assert sorted(PROGRAM.kernels) == sorted(SIGNATURES) == sorted(DECLARED)


@pytest.mark.parametrize("kernel", PROGRAM.kernels)
def test_the_packing_is_the_headers_struct(kernel: str) -> None:
    _, name = SIGNATURES[kernel]
    headers.assert_packs(DECLARED[kernel].layout, PROGRAM.file, name)


def test_the_constants_are_the_headers(tmp_path: pathlib.Path) -> None:
    needed = {"CHUNK", "SEQUENCE_FIELDS", "KEYS", "VALUES", "THREADS", "SHARED_BYTES"}
    needed |= {"PREPARE_SHARED_BYTES", "BLOCKS_OF_MULTIPROCESSOR"}
    ON_HOST.assert_constants((metadata, cuda), needed, tmp_path)


def test_nvcc_compiles_it_well(tmp_path: pathlib.Path) -> None:
    headers.assert_compiled_well(PROGRAM, headers.nvcc_log(PROGRAM.file, ARCHITECTURE, tmp_path))


def test_nvrtc_compiles_it_well(nvrtc_13: nvrtc.Compiler) -> None:
    headers.assert_compiled_well(PROGRAM, headers.nvrtc_log(PROGRAM.source(), PROGRAM.header, ARCHITECTURE, nvrtc_13))


def test_products_that_wait_for_one_another_are_noticed(tmp_path: pathlib.Path, nvrtc_13: nvrtc.Compiler) -> None:
    never = headers.mutant(PROGRAM.file, 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", tmp_path)
    assert "(C75" in headers.nvrtc_log(never.read_bytes(), "mutant.cuh", ARCHITECTURE, nvrtc_13)
