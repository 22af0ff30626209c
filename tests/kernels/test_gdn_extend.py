# SPDX-License-Identifier: Apache-2.0
"""Gated delta net's extend: the Triton form against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.gdn_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from sglang_bcg_fixes.model import Accepted, Rejected
from tests import processes
from tests.kernels import accuracy, linear_extend_cases, mutants
from tests.kernels import gdn_extend_cases as cases
from tests.kernels.gdn_extend_mutants import AROUND, CHUNK, EXACT, MUTANTS, TUNING, faults, step

# of results in bfloat16, which are rounded by as much
OF_HALVES = 0.002


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


@pytest.mark.parametrize("modules", [(form, metadata), (stepwise, stepwise)], ids=["triton", "stepwise"])
@pytest.mark.parametrize("name", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(name: str, modules: tuple[Any, Any]) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, kept=torch.bfloat16, **options)
    tuning = TUNING if modules[0] is form else stepwise.Tuning()

    def after(of: cases.Step) -> cases.After:
        return cases.Launched(of, tuning, AROUND, CHUNK, modules).run()

    found = after(drawn)
    assert cases.faults(drawn, found, CHUNK, OF_HALVES) == []
    # only the pool is in half precision: what is kept is the other's, rounded once
    exact = after(dataclasses.replace(drawn, state=drawn.state.float()))
    assert cases.same_bits(found.output, exact.output)
    kept = [slot for slot in drawn.slots if slot >= 0]
    kept += [slot for slot, length in zip(drawn.track_slots, drawn.tracked, strict=True) if length is not None]
    assert cases.same_bits(found.state[kept], exact.state[kept].bfloat16())


@pytest.mark.parametrize("span", [16, 48])
@pytest.mark.parametrize("name", ["checkpoints", "without a slot"])
def test_in_spans(name: str, span: int) -> None:
    lengths, options = STEPS[name]
    drawn = step(lengths, **options)
    assert cases.faults(drawn, run(drawn, dataclasses.replace(AROUND, padding=21, span=span)), CHUNK, EXACT) == []


@pytest.mark.parametrize("lengths", [[63], [64, 65], [3, 130]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_chunks_of_64(lengths: list[int], dtype: torch.dtype) -> None:
    drawn = step(lengths, dtype=dtype)
    # a few numbers in bfloat16: one of them may be rounded badly and be half of a result
    tolerance = EXACT if dtype is torch.float16 else 2 * accuracy.TOLERANCE
    assert cases.faults(drawn, run(drawn, chunk=64), 64, tolerance) == []


@pytest.mark.parametrize(
    "shape",
    [
        Shape(key_heads=2, value_heads=4, keys=32, values=32, width=4),
        Shape(key_heads=3, value_heads=3, keys=16, values=32, width=3),
        Shape(key_heads=1, value_heads=4, keys=32, values=16, width=2),
        Shape(key_heads=1, value_heads=3, keys=16, values=16, width=4),
    ],
    ids=str,
)
def test_other_shapes(shape: Shape) -> None:
    drawn = cases.draw(shape, [18, 5], device="cpu", dtype=torch.float16, fresh=[1])
    assert cases.faults(drawn, run(drawn), CHUNK, EXACT) == []


def test_many_sequences() -> None:
    shape, lengths = Shape(1, 1, 16, 16, 4), [1 + number % 3 for number in range(150)]
    drawn = cases.draw(shape, lengths, device="cpu", dtype=torch.float16, fresh=range(0, 150, 7), gone=[5, 149])
    around = dataclasses.replace(AROUND, max_sequences=serving.MOST_SEQUENCES)
    assert cases.faults(drawn, run(drawn, around), CHUNK, EXACT) == []


@pytest.mark.parametrize("part", [16, 32])
def test_values_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 1, 16, 32, 4), [20], device="cpu", dtype=torch.float16)
    # not bit by bit: the interpreter multiplies with numpy, whose order of sums is the processor's affair
    launched = cases.Launched(drawn, dataclasses.replace(TUNING, part=part), AROUND, CHUNK)
    assert cases.faults(drawn, launched.run(), CHUNK, EXACT) == []


def test_nothing_around_a_sequence_changes_its_bits() -> None:
    drawn = step([20, 7, 33, 1], fresh=[1], dtype=torch.bfloat16)
    together = run(drawn)
    bare = run(drawn, cases.Surroundings())
    assert cases.differences(together, bare, drawn.tokens) == []
    in_spans = run(drawn, dataclasses.replace(AROUND, span=16))
    assert cases.differences(together, in_spans, drawn.tokens) == []
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
    first, second = (dataclasses.replace(drawn, lengths=[length]) for length in (16, 24))
    first = dataclasses.replace(first, mixed_qkv=drawn.mixed_qkv[:16], a=drawn.a[:16], b=drawn.b[:16])
    between = run(first, cases.Surroundings())
    second = dataclasses.replace(
        second,
        mixed_qkv=drawn.mixed_qkv[16:],
        a=drawn.a[16:],
        b=drawn.b[16:],
        conv=between.conv,
        state=between.state,
    )
    after = run(second, cases.Surroundings())
    assert cases.same_bits(torch.cat([between.output, after.output]), whole.output[:40])
    assert cases.same_bits(after.conv, whole.conv) and cases.same_bits(after.state, whole.state)


def test_more_sequences_than_the_tables_hold_are_refused() -> None:
    tables = metadata.Tables(64, 2, "cpu")
    three = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 sequences, but the tables were made for 2"):
        tables.fill(three, three, three)


def test_an_output_that_does_not_fit_is_refused() -> None:
    drawn = step([20])
    launched = cases.Launched(drawn, TUNING, cases.Surroundings(span=16), CHUNK)
    launched.fill()
    launched.scratch.scores = launched.scratch.scores[:, :-13]
    with pytest.raises(ValueError, match="the scratch is for 7 rows, too few for an output of 20 in spans of 16"):
        launched.extend()
    launched.tables.max_tokens = 19
    launched.scratch.scores = drawn.mixed_qkv.new_empty(2, 40, CHUNK)
    with pytest.raises(ValueError, match="an output of 20 rows, but the tables were made for 19 tokens"):
        launched.extend()


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_where_it_runs(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    answer = form.ready(0)
    if runs:
        assert isinstance(answer, Accepted)
    else:
        assert isinstance(answer, Rejected) and f"sm_{capability[0]}{capability[1]}" in answer.reason


QWEN3_NEXT = Shape(key_heads=16, value_heads=32, keys=128, values=128, width=4)


def test_what_is_refused() -> None:
    conv = torch.empty(2, QWEN3_NEXT.channels, 3, dtype=torch.bfloat16, device="meta")
    state = torch.empty(2, 32, 128, 128, device="meta")
    right: dict[str, Any] = {"kind": torch.bfloat16, "activation": "silu", "conv": conv, "state": state}
    assert refusal(QWEN3_NEXT, **right) is None
    assert refusal(QWEN3_NEXT, **{**right, "state": state[::2]}) is None
    assert refusal(QWEN3_NEXT, **{**right, "state": state.bfloat16()}) is None
    wrong: dict[str, tuple[Shape, dict[str, Any]]] = {
        "heads of 96 keys and 128 values": (dataclasses.replace(QWEN3_NEXT, keys=96), {}),
        "32 value heads on 12 key heads": (dataclasses.replace(QWEN3_NEXT, key_heads=12), {}),
        "a convolution of width 6": (dataclasses.replace(QWEN3_NEXT, width=6), {}),
        "the activation None": (QWEN3_NEXT, {"activation": None}),
        "projections in torch.float32": (QWEN3_NEXT, {"kind": torch.float32}),
        "windows in torch.float32": (QWEN3_NEXT, {"conv": conv.float()}),
        "windows of (8192, 4)": (QWEN3_NEXT, {"conv": torch.empty(2, 8192, 4, dtype=torch.bfloat16, device="meta")}),
        "states in torch.float16": (QWEN3_NEXT, {"state": state.half()}),
        "states of (32, 128, 64)": (QWEN3_NEXT, {"state": state[..., :64]}),
        "states with strides": (QWEN3_NEXT, {"state": state.transpose(2, 3)}),
    }
    for words, (shape, changed) in wrong.items():
        said = refusal(shape, **{**right, **changed})
        assert said is not None and said.startswith(f"no kernel for {words}"), said


def test_tokens_past_the_capacity_are_not_written() -> None:
    """Nobody should; what is behind the buffers stays all the same."""
    tables = metadata.Tables(20, 3, "cpu", CHUNK)
    behind = [
        torch.full((4 * len(each), *each.shape[1:]), -7, dtype=torch.int32)
        for each in (tables.chunks, tables.sequences)
    ]
    tables.chunks, tables.sequences = (each[: len(each) // 4] for each in behind)
    lengths, slots, prefixes = (torch.tensor(each).int() for each in ([30, 30, 30], [1, 2, 3], [0, 0, 0]))
    tables.fill(lengths, slots, prefixes)
    assert int(tables.sequences[:1, 1].max()) == 20 and tables.counts.tolist()[1:3] == [20, 1]
    assert all(bool((each[len(each) // 4 :] == -7).all()) for each in behind)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_tables_by_hand(kind: torch.dtype) -> None:
    tables = metadata.Tables(200, 6, "cpu")
    given = ([65, 0, 3, 128], [4, 7, -1, 9], [0, 0, 8, 1])
    lengths, slots, prefixes = (torch.tensor(each, dtype=kind) for each in given)
    tables.fill(lengths, slots, prefixes)
    assert tables.counts.tolist()[:3] == [5, 196, 2]
    none = [-1, -1]
    assert tables.chunks[:5, :7].tolist() == [
        [0, 0, 65, 4, 0, *none],
        [64, 0, 65, 4, 0, *none],
        [65, 65, 68, -1, 1, *none],
        [68, 68, 196, 9, 1, *none],
        [132, 68, 196, 9, 1, *none],
    ]
    assert tables.sequences[:2, :5].tolist() == [[68, 196, 9, *none], [0, 65, 4, *none]]
    assert tables.sequences[:2, 6].tolist() == [1, 0]


def tables_in_python(
    lengths: list[int], slots: list[int], prefixes: list[int], after: list[int], to: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows of chunks, and of the sequences with work, longest first."""
    chunks: list[list[int]] = []
    sequences: list[list[int]] = []
    start = 0
    for number, (length, slot, prefix) in enumerate(zip(lengths, slots, prefixes, strict=True)):
        end, has_prefix, kept = start + length, int(prefix > 0), [after[number], to[number]]
        if length and slot >= 0:
            sequences.append([start, end, slot, *kept, len(chunks), has_prefix])
        firsts = range(start, end, metadata.CHUNK)
        chunks += [[first, start, end, slot, has_prefix, *kept] for first in firsts]
        start = end
    return chunks, sorted(sequences, key=lambda row: row[0] - row[1])


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_as_many_sequences_as_a_server_has(seed: int) -> None:
    source = random.Random(seed)
    most = serving.MOST_SEQUENCES
    given = source.choice([most, most - 1, 300])
    lengths = [source.choice([0, 1, 2, 3, 16, 63, 64, 65, 130]) for _ in range(given)]
    slots = [number if source.random() < 0.9 else -1 for number in range(given)]
    prefixes = [source.choice([0, 0, 5]) for _ in range(given)]
    is_tracked = [source.random() < 0.5 and slot >= 0 for slot in slots]
    past = [source.randint(0, length) for length in lengths]
    after = [past[each] // metadata.CHUNK * metadata.CHUNK if is_tracked[each] else -1 for each in range(given)]
    to = [1000 + each if is_tracked[each] else -1 for each in range(given)]
    tables = metadata.Tables(sum(lengths) + source.choice([0, 70]), most, "cpu")
    tracking = metadata.Tracking(
        torch.tensor(is_tracked),
        torch.arange(1000, 1000 + given),
        torch.tensor([prefix + each for prefix, each in zip(prefixes, past, strict=True)]),
    )
    tables.fill(torch.tensor(lengths), torch.tensor(slots), torch.tensor(prefixes), tracking)
    chunks, sequences = tables_in_python(lengths, slots, prefixes, after, to)
    assert tables.counts.tolist()[:3] == [len(chunks), sum(lengths), len(sequences)]
    assert tables.chunks[: len(chunks), :7].tolist() == chunks
    assert tables.sequences[: len(sequences), :7].tolist() == sequences


@pytest.fixture(scope="module")
def noticed() -> dict[str, bool]:
    return mutants.fates("tests.kernels.gdn_extend_mutants", list(MUTANTS))


@pytest.mark.parametrize("case", sorted({case for case, _, _ in MUTANTS.values()}))
def test_what_mutants_are_held_against(case: str) -> None:
    assert faults(case, (form, metadata)) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, noticed: dict[str, bool]) -> None:
    assert noticed[mutant]


def test_the_compiler_takes_every_kernel() -> None:
    """The interpreter takes what the compiler refuses; and products of a chunk run on Hopper's own instructions."""
    done = processes.python(
        "-m", "tests.kernels.compile_gdn_extend", environment={"TRITON_INTERPRET": "0"}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {kernel["name"] for kernel in found} == {"_fill", "prepare", "advance"}
    for kernel in found:
        assert kernel["shared"] <= 232448 - 1024, kernel
        if kernel["name"] == "advance":
            # the chain of products goes from registers to registers
            assert kernel["wgmma from registers"] >= 24, kernel
            # some registers wait in memory between chunks, none of the products' do
            assert kernel["stack"] <= 512, kernel
