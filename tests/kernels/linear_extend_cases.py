# SPDX-License-Identifier: Apache-2.0
"""Steps that every implementation of a linear layer must get right, with NaN in all memory that it must not use."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import torch

from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK
from tests.kernels import accuracy

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class After:
    """Results of a step: the output's rows, and both pools with all their slots."""

    output: Any
    conv: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class Step:
    """Sequences back to back. Lengths may be 0 and slots below 0; `tracked` has None for no checkpoint.

    The pools have more slots than are used; those hold NaN, and so does what a sequence without a prefix must not read.
    """

    shape: Any
    lengths: Sequence[int]
    prefixes: Sequence[int]
    slots: Sequence[int]
    tracked: Sequence[int | None]
    track_slots: Sequence[int]
    conv: Any
    state: Any

    # the inputs of every token, in the order in which an implementation takes them, and those that all tokens share
    of_tokens: ClassVar[tuple[str, ...]]
    of_layer: ClassVar[tuple[str, ...]]

    # of each kind of layer

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Sizes of a token's output."""
        raise NotImplementedError

    def recurrent(self, kind: Any) -> accuracy.Results:
        """Run the reference, on pools that hold the sequences in order."""
        raise NotImplementedError

    # of all of them

    @property
    def projections(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.of_tokens)

    @property
    def weights(self) -> dict[str, Any]:
        """The inputs that all tokens share, as an implementation names them."""
        return {name: getattr(self, name) for name in self.of_layer}

    def with_projections(self, *projections: Any, **changed: Any) -> Self:
        return dataclasses.replace(self, **dict(zip(self.of_tokens, projections, strict=True)), **changed)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def device(self) -> Any:
        return self.state.device

    def alone(self, number: int) -> Self:
        """Extract one sequence of the step, with the same inputs and pools."""
        rows = self.rows(number)
        one = slice(number, number + 1)
        fields = ("lengths", "prefixes", "slots", "tracked", "track_slots")
        return self.with_projections(
            *(tensor[rows] for tensor in self.projections), **{name: getattr(self, name)[one] for name in fields}
        )

    @property
    def with_work(self) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if slot >= 0 and self.lengths[number]]

    def rows(self, number: int) -> slice:
        start = sum(self.lengths[:number])
        return slice(start, start + self.lengths[number])


AnyStep = TypeVar("AnyStep", bound=Step)
# an implementation under test, on a step in its surroundings
Run = Callable[..., After]


def requests(
    lengths: Sequence[int], fresh: Sequence[int], gone: Sequence[int], tracked: dict[int, int] | None, seed: int
) -> dict[str, Any]:
    """Draw the fields of a step that say who its sequences are, for pools of `slots_of` slots.

    `fresh` sequences have no prefix, `gone` ones no slot; `tracked` says how many new tokens a checkpoint covers.
    """
    slots = random.Random(seed).sample(range(1, slots_of(lengths)), 2 * len(lengths))
    prefixes = [0 if number in fresh else 64 + number for number in range(len(lengths))]
    after = [(tracked or {}).get(number) for number in range(len(lengths))]
    return {
        "lengths": list(lengths),
        "prefixes": prefixes,
        "slots": [-1 if number in gone else slot for number, slot in enumerate(slots[: len(lengths)])],
        "tracked": [None if each is None else prefix + each for each, prefix in zip(after, prefixes, strict=True)],
        "track_slots": slots[len(lengths) :],
    }


def slots_of(lengths: Sequence[int]) -> int:
    return 2 * len(lengths) + 3


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Properties that must not matter: padding rows, capacities, and the projections' row strides."""

    padding: int = 0
    more_tokens: int = 0
    max_sequences: int | None = None
    columns_between: int = 0
    span: int | None = None


NOTHING = Surroundings()


def between_slots(pool: Any) -> Any:
    """Make room for a pool between two slots that are nobody's: slot -1 and the one behind the last are in there."""
    return pool.new_empty(len(pool) + 2, *pool.shape[1:])


def floats_between_slots(count: int) -> Callable[[Any], Any]:
    """Make another of it, with so many numbers behind each slot."""

    def between(pool: Any) -> Any:
        rows, size = len(pool) + 2, pool[0].numel()
        return pool.new_empty(rows, size + count)[:, :size].view(rows, *pool.shape[1:])

    return between


class Launched:
    """A step on its own buffers; every run starts with the same pools and with NaN everywhere else."""

    # the layer's Triton implementation and its tables, which run where a test names no others
    modules: tuple[Any, Any]

    def __init__(
        self,
        step: Step,
        tuning: Any,
        around: Surroundings = NOTHING,
        chunk: int = CHUNK,
        modules: tuple[Any, Any] | None = None,
    ) -> None:
        self.step, self.tuning, self.chunk = step, tuning, chunk
        self.implementation, self.metadata = modules or self.modules
        rows = step.tokens + around.padding
        sequences = around.max_sequences or len(step.lengths)
        self.tables = self.metadata.Tables(rows + around.more_tokens, sequences, step.device, chunk, around.span)
        for table in self.tables.buffers:
            table.fill_(-(2**30))
        kind = step.projections[0].dtype
        self.scratch = self.implementation.Scratch.for_rows(
            rows + around.more_tokens, self.tables, step.shape, kind, tuning
        )

        def poisoned(tensor: Any) -> Any:
            wide = torch.full((rows, tensor.shape[1] + around.columns_between), NAN, dtype=kind, device=step.device)
            wide[: len(tensor), : tensor.shape[1]] = tensor
            return wide[:, : tensor.shape[1]]

        self.inputs = [poisoned(tensor) for tensor in step.projections]
        # a chunk's rows on either side
        self.around_output = torch.empty(rows + 2 * chunk, *step.output_sizes, dtype=kind, device=step.device)
        self.output = self.around_output[chunk : chunk + rows]
        self.around_conv, self.around_state = between_slots(step.conv), between_slots(step.state)
        self.conv, self.state = self.around_conv[1:-1], self.around_state[1:-1]

    def restore(self) -> None:
        self.around_conv.fill_(NAN)
        self.around_state.fill_(NAN)
        self.conv.copy_(self.step.conv)
        self.state.copy_(self.step.state)
        of_scratch = [getattr(self.scratch, each.name) for each in dataclasses.fields(self.scratch)]
        for tensor in (self.around_output, *of_scratch):
            tensor.fill_(NAN)

    def fill(self) -> None:
        step = self.step

        def integers(values: Sequence[int], kind: Any = torch.int32) -> Any:
            return torch.tensor(values, dtype=kind, device=step.device)

        tracking = None
        if any(each is not None for each in step.tracked):
            tracking = self.metadata.Tracking(
                mask=integers([each is not None for each in step.tracked], torch.bool),
                slots=integers(step.track_slots, torch.int64),
                lengths=integers([each or 0 for each in step.tracked], torch.int64),
                unit=self.chunk,
            )
        self.tracking = tracking is not None
        self.tables.fill(integers(step.lengths), integers(step.slots), integers(step.prefixes), tracking)

    def extend(self) -> None:
        step = self.step
        self.implementation.extend(
            *self.inputs,
            shape=step.shape,
            **step.weights,
            conv=self.conv,
            state=self.state,
            tables=self.tables,
            scratch=self.scratch,
            output=self.output,
            tracking=self.tracking,
            tuning=self.tuning,
        )

    def after(self) -> After:
        for name, around in ("windows", self.around_conv), ("states", self.around_state):
            assert bool(around[[0, -1]].isnan().all()), f"something was written beside the pool of {name}"
        beside = torch.cat([self.around_output[: self.chunk], self.around_output[self.chunk + len(self.output) :]])
        assert bool(beside.isnan().all()), "something was written beside the output"
        return After(self.output.clone(), self.conv.clone(), self.state.clone())

    def run(self) -> After:
        self.restore()
        self.fill()
        self.extend()
        return self.after()


def wanted(step: Step, lengths: Sequence[int] | None = None, kind: Any = None) -> accuracy.Results:
    """Run the reference on the sequences with work, in order, on their first `lengths` tokens."""
    taken = step.with_work
    slots = [step.slots[number] for number in taken]
    kept = [step.lengths[number] if lengths is None else lengths[number] for number in taken]
    starts = [step.rows(number).start for number in taken]
    rows = [slice(start, start + length) for start, length in zip(starts, kept, strict=True)]
    fresh = torch.tensor([step.prefixes[number] == 0 for number in taken], device=step.device)
    short = step.with_projections(
        *(torch.cat([tensor[each] for each in rows]) for tensor in step.projections),
        lengths=kept,
        conv=step.conv[slots].masked_fill(fresh[:, None, None], 0),
        state=step.state[slots].masked_fill(fresh[:, None, None, None], 0),
    )
    return short.recurrent(kind)


def same_bits(one: Any, other: Any) -> bool:
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool((one.contiguous().view(as_integers) == other.contiguous().view(as_integers)).all())


def assert_same_sequence(one: After, rows: slice, other: After, other_rows: slice, slot: int) -> None:
    """Compare a sequence's output and state in two steps that both have it, in these rows and in this slot."""
    assert same_bits(one.output[rows], other.output[other_rows])
    assert same_bits(one.state[slot], other.state[slot])


def assert_neighbours_change_nothing(step: Step, together: After, run: Run) -> None:
    """Run each sequence of the step alone, in other surroundings: it must have the bits that it has among others."""
    for number, slot in enumerate(step.slots):
        alone = step.alone(number)
        after = run(alone, Surroundings(padding=40, max_sequences=3))
        assert_same_sequence(after, slice(alone.tokens), together, step.rows(number), slot)
        assert same_bits(after.conv[slot], together.conv[slot])


def assert_nan_stays_in_its_sequence(step: Step, run: Run) -> None:
    """Poison the second of three sequences: what the first tensor has, and a step size or gate without a bound."""
    right, rows = run(step), step.rows(1)
    inputs, gate, *_ = step.projections
    inputs[rows], gate[rows] = NAN, float("inf")
    after = run(step)
    assert bool(after.output[rows].isnan().all())
    for number in (0, 2):
        assert_same_sequence(after, step.rows(number), right, step.rows(number), step.slots[number])


def batch_after_batch(draw: Callable[..., AnyStep]) -> Iterator[tuple[AnyStep, Surroundings]]:
    """Yield batches as a server has them, for buffers and launches as a graph keeps them."""
    capacity, most = 48, 5
    source = random.Random(0)
    for _ in range(6):
        lengths = [source.choice((0, 1, 7, 16, 17)) for _ in range(source.randint(1, most))]
        while sum(lengths) > capacity:
            lengths.pop()
        gone = [number for number in range(len(lengths)) if source.random() < 0.2]
        step = draw(lengths or [1], gone=gone, seed=source.randrange(100))
        yield step, Surroundings(padding=capacity - step.tokens, max_sequences=most)


def faults(
    step: Step,
    after: After,
    chunk: int = CHUNK,
    tolerance: float = accuracy.TOLERANCE,
    of_checkpoint: float | None = None,
) -> list[str]:
    """List what differs from the reference; `of_checkpoint` is a wider tolerance of checkpoints."""
    found: list[str] = []
    taken = step.with_work
    used = {step.slots[number] for number in taken}
    real = torch.zeros(len(after.output), dtype=torch.bool, device=step.device)
    for number in taken:
        real[step.rows(number)] = True
    if not bool((after.output[~real] == 0).all()):
        found.append("rows without a token are not zero")
    if taken:
        results = wanted(step)
        slots = [step.slots[number] for number in taken]
        got = accuracy.Results(after.output[real], after.conv[slots], after.state[slots])
        errors = accuracy.errors(got, results)
        found += [f"{name} off by {value:.5f}" for name, value in errors.items() if not value <= tolerance]
    boundaries = {
        number: (min(length, step.lengths[number] + step.prefixes[number]) - step.prefixes[number]) // chunk * chunk
        for number, length in enumerate(step.tracked)
        if length is not None and number in taken
    }
    if boundaries:
        there = wanted(step, [boundaries.get(number, 0) for number in range(len(step.lengths))])
        for number, boundary in boundaries.items():
            slot, place = step.track_slots[number], taken.index(number)
            used.add(slot)
            if not same_bits(after.conv[slot], there.conv[place].to(after.conv.dtype)):
                found.append(f"the window of the checkpoint of sequence {number} after {boundary} tokens")
            error = accuracy.relative(after.state[slot], there.state[place])
            # a state that nothing has changed is not rounded either
            if not error <= ((of_checkpoint or tolerance) if boundary else 0):
                found.append(f"the state of the checkpoint of sequence {number} is off by {error:.5f}")
    untouched = [slot for slot in range(len(step.state)) if slot not in used]
    if not same_bits(after.state[untouched], step.state[untouched]):
        found.append("a state that belongs to nobody has changed")
    if not same_bits(after.conv[untouched], step.conv[untouched]):
        found.append("a window that belongs to nobody has changed")
    return found


def differences(one: After, other: After, rows: int) -> list[str]:
    """List what differs between two runs that must be equal, bit by bit, in the first rows and the pools."""
    pairs = {
        "output": (one.output[:rows], other.output[:rows]),
        "conv": (one.conv, other.conv),
        "state": (one.state, other.state),
    }
    return [f"{name} differs" for name, pair in pairs.items() if not same_bits(*pair)]


def captured(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def random_lengths(source: random.Random, choices: Sequence[int], most_tokens: int) -> list[int]:
    """Draw the lengths of a step, at least one of which is not zero."""
    lengths: list[int] = []
    for _ in range(source.choice((1, 1, 2, 4, 8, 33))):
        lengths.append(source.choice([length for length in choices if sum(lengths) + length <= most_tokens]))
    if not any(lengths):
        lengths[0] = source.randint(1, 70)
    return lengths


def random_requests(source: random.Random, lengths: Sequence[int], some: Sequence[int]) -> dict[str, Any]:
    """Draw who has no prefix and who has a checkpoint, among some of a step's sequences, and who has no slot."""
    return {
        "fresh": [number for number in some if source.random() < 0.5],
        "gone": [number for number in range(len(lengths)) if source.random() < 0.1],
        "tracked": {number: source.randint(0, lengths[number]) for number in some} if source.random() < 0.5 else None,
    }


def faults_of_graphs(
    step: AnyStep,
    around: Surroundings,
    launched: Callable[[AnyStep, Surroundings], Launched],
    of_checkpoint: float,
    capture: Callable[[Callable[[], None]], Callable[[], None]] = captured,
) -> Iterator[str]:
    """List what is wrong on a GPU: against the reference, replayed, and of each sequence alone."""
    whole = launched(step, around)
    eager = whole.run()
    yield from faults(step, eager, of_checkpoint=of_checkpoint)
    # captured while the tables hold no work
    whole.tables.fill(*(torch.zeros(1, dtype=torch.int32, device=step.device) for _ in range(3)))
    replay = capture(whole.extend)
    whole.restore()
    whole.fill()
    replay()
    rows = len(eager.output)
    yield from (f"replayed: {difference}" for difference in differences(eager, whole.after(), rows))
    for number, slot in enumerate(step.slots):
        if slot < 0 or not step.lengths[number] or len(step.slots) == 1:
            continue
        alone = step.alone(number)
        # an implementation may cut a sequence that is in one span
        after = launched(alone, Surroundings(padding=7, span=around.span)).run()
        if not same_bits(after.output[: alone.tokens], eager.output[step.rows(number)]):
            yield f"sequence {number}: its output is another one alone"
        if not same_bits(after.state[slot], eager.state[slot]):
            yield f"sequence {number}: its state is another one alone"
