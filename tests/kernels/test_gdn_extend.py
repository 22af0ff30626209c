# SPDX-License-Identifier: Apache-2.0
"""Gated delta net's extend: the Triton implementation against the fp32 reference, small, on Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, refusal, stepwise
from sglang_bcg_fixes.kernels.linear_extend import metadata, serving
from tests import processes
from tests.kernels import accuracy, gdn_extend_mutants, linear_extend_tests
from tests.kernels import gdn_extend_cases as cases
from tests.kernels.gdn_extend_mutants import TUNING, step
from tests.kernels.linear_extend_mutants import AROUND, CHUNK
from tests.kernels.linear_extend_tests import (  # noqa: F401
    Operation,
    Steps,
    assert_only_the_pool_is_rounded,
    assert_refused,
    noticed,
    operation,
    pytest_generate_tests,
    test_a_mutant_is_noticed,
    test_against_the_reference,
    test_chunks_of_64,
    test_many_sequences,
    test_nothing_around_a_sequence_changes_its_bits,
    test_one_launch_serves_batch_after_batch,
    test_other_shapes,
    test_the_stepwise_implementation_against_the_reference,
    test_two_steps_are_one_long_step,
    test_what_is_not_a_number_stays_in_its_sequence,
    test_what_mutants_are_held_against,
    test_where_it_runs,
)

# of results in bfloat16, which are rounded by as much
OF_HALVES = 0.002
STEPS: Steps = {
    **linear_extend_tests.STEPS,
    "with bias": ([19, 4], {"bias": True}),
    "gates near 0": ([40], {"gates": "near 0"}),
    "gates far below": ([40, 3], {"gates": "far below"}),
    "keys alike": ([40], {"equal_keys": True, "gates": "near 0"}),
    **linear_extend_tests.WITH_CHECKPOINTS,
}
OPERATION = Operation(
    cases,
    gdn_extend_mutants,
    stepwise,
    STEPS,
    of_bfloat16=2 * accuracy.TOLERANCE,
    shapes=[
        Shape(key_heads=2, value_heads=4, keys=32, values=32, width=4),
        Shape(key_heads=3, value_heads=3, keys=16, values=32, width=3),
        Shape(key_heads=1, value_heads=4, keys=32, values=16, width=2),
        Shape(key_heads=1, value_heads=3, keys=16, values=16, width=4),
    ],
    narrow=Shape(1, 1, 16, 16, 4),
    elsewhere=(cases.Surroundings(), dataclasses.replace(AROUND, span=16)),
    capabilities=[((8, 0), False), ((9, 0), True), ((10, 0), False)],
)


@pytest.mark.parametrize("of", ["triton", "stepwise"])
@pytest.mark.parametrize("name", ["checkpoints", "a checkpoint of nothing", "without prefix", "several chunks"])
def test_states_in_bfloat16(name: str, of: str) -> None:
    drawn = OPERATION.drawn(name, kept=torch.bfloat16)
    run = OPERATION.run if of == "triton" else OPERATION.run_stepwise
    after = run(drawn)
    OPERATION.assert_right(drawn, after, tolerance=OF_HALVES)
    assert_only_the_pool_is_rounded(drawn, after, run)


@pytest.mark.parametrize("span", [16, 48])
@pytest.mark.parametrize("name", ["checkpoints", "without a slot"])
def test_in_spans(name: str, span: int) -> None:
    drawn = OPERATION.drawn(name)
    OPERATION.assert_right(drawn, OPERATION.run(drawn, dataclasses.replace(AROUND, padding=21, span=span)))


@pytest.mark.parametrize("part", [16, 32])
def test_values_in_parts(part: int) -> None:
    drawn = cases.draw(Shape(1, 1, 16, 32, 4), [20], dtype=torch.float16)
    # not bit by bit: the interpreter multiplies with numpy, whose order of sums is the processor's affair
    launched = OPERATION.launched(drawn, AROUND, tuning=dataclasses.replace(TUNING, part=part))
    OPERATION.assert_right(drawn, launched.run())


def test_more_sequences_than_the_tables_hold_are_refused() -> None:
    tables = metadata.Tables(64, 2, "cpu")
    three = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 sequences, but the tables were made for 2"):
        tables.fill(three, three, three)


def test_an_output_that_does_not_fit_is_refused() -> None:
    drawn = step([20])
    launched = OPERATION.launched(drawn, cases.Surroundings(span=16))
    launched.fill()
    launched.scratch.scores = launched.scratch.scores[:, :-13]
    with pytest.raises(ValueError, match="the scratch is for 7 rows, too few for an output of 20 in spans of 16"):
        launched.extend()
    launched.tables.max_tokens = 19
    launched.scratch.scores = drawn.mixed_qkv.new_empty(2, 40, CHUNK)
    with pytest.raises(ValueError, match="an output of 20 rows, but the tables were made for 19 tokens"):
        launched.extend()


def test_what_is_refused() -> None:
    published = Shape(key_heads=16, value_heads=32, keys=128, values=128, width=4)
    wrong = {
        "heads of 96 keys and 128 values": dataclasses.replace(published, keys=96),
        "32 value heads on 12 key heads": dataclasses.replace(published, key_heads=12),
    }
    assert_refused(refusal, published, (32, 128, 128), wrong)


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


def test_no_table_is_compiled_again_for_a_batch_at_another_address() -> None:
    """The interpreter does not keep what a parameter is specialised on."""
    program = """
from sglang_bcg_fixes.kernels.linear_extend.metadata import _fill
print(*(each.name for each in _fill.params if each.do_not_specialize_on_alignment))
"""
    done = processes.python("-c", program, environment={"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    # of a batch; all others are the tables' own, or numbers
    of_batches = ["lengths", "slots", "prefixes", "track_mask", "track_slots", "track_lengths"]
    assert done.stdout.split() == of_batches


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
