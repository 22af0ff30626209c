# SPDX-License-Identifier: Apache-2.0
"""Steps that every form must get right, with NaN in all memory that it must not use.

The tests run them small, on Triton's interpreter; a GPU runs the same ones at a model's sizes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.gdn_extend import Shape, metadata, reference, stepwise
from sglang_bcg_fixes.kernels.gdn_extend import triton as form
from sglang_bcg_fixes.kernels.gdn_extend.metadata import CHUNK

NAN = float("nan")
# of A_log and dt_bias: heads that forget slowly and heads that forget at once; hardly at all; all at once
GATES = {"mixed": (-4.0, 2.0, 0.0), "near 0": (-12.0, -8.0, 0.0), "far below": (3.0, 6.0, 40.0)}


@dataclasses.dataclass(frozen=True)
class After:
    """Results of a step: the output's rows, and both pools with all their slots."""

    output: Any
    conv: Any
    state: Any

    def of_rank(self, number: int, ranks: int, whole: Shape) -> After:
        return After(
            of_rank(self.output, 1, number, ranks),
            channels_of_rank(self.conv, 1, whole, number, ranks),
            of_rank(self.state, 1, number, ranks),
        )


def of_rank(tensor: Any, dimension: int, number: int, ranks: int) -> Any:
    return tensor.chunk(ranks, dimension)[number].contiguous()


def channels_of_rank(tensor: Any, dimension: int, whole: Shape, number: int, ranks: int) -> Any:
    """A rank's channels: its queries, its keys and its values, each of them a part of all."""
    of_keys, of_values = whole.key_heads * whole.keys, whole.value_heads * whole.values
    parts = tensor.split([of_keys, of_keys, of_values], dimension)
    return torch.cat([of_rank(each, dimension, number, ranks) for each in parts], dimension)


@dataclasses.dataclass(frozen=True)
class Step:
    """Sequences back to back. Lengths may be 0 and slots below 0; `tracked` has None for no checkpoint.

    The pools have more slots than are used; those hold NaN, and so does a window whose sequence has no prefix.
    """

    shape: Shape
    lengths: Sequence[int]
    prefixes: Sequence[int]
    slots: Sequence[int]
    tracked: Sequence[int | None]
    track_slots: Sequence[int]
    mixed_qkv: Any
    a: Any
    b: Any
    conv_weights: Any
    bias: Any
    A_log: Any
    dt_bias: Any
    conv: Any
    state: Any

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def device(self) -> Any:
        return self.state.device

    def alone(self, number: int) -> Step:
        """Extract one sequence of the step, with the same inputs and pools."""
        rows = self.rows(number)
        one = slice(number, number + 1)
        fields = ("lengths", "prefixes", "slots", "tracked", "track_slots")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[one] for name in fields},
            mixed_qkv=self.mixed_qkv[rows],
            a=self.a[rows],
            b=self.b[rows],
        )

    def rank(self, number: int, ranks: int) -> Step:
        """Extract the heads that one of several ranks has under tensor parallelism."""
        whole = self.shape
        shape = dataclasses.replace(whole, key_heads=whole.key_heads // ranks, value_heads=whole.value_heads // ranks)

        def heads(tensor: Any) -> Any:
            return of_rank(tensor, -1, number, ranks)

        def channels(tensor: Any, dimension: int) -> Any:
            return channels_of_rank(tensor, dimension, whole, number, ranks)

        return dataclasses.replace(
            self,
            shape=shape,
            mixed_qkv=channels(self.mixed_qkv, 1),
            a=heads(self.a),
            b=heads(self.b),
            conv_weights=channels(self.conv_weights, 0),
            bias=None if self.bias is None else channels(self.bias, 0),
            A_log=heads(self.A_log),
            dt_bias=heads(self.dt_bias),
            conv=channels(self.conv, 1),
            state=of_rank(self.state, 1, number, ranks),
        )

    @property
    def with_work(self) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if slot >= 0 and self.lengths[number]]

    def rows(self, number: int) -> slice:
        start = sum(self.lengths[:number])
        return slice(start, start + self.lengths[number])


def draw(
    shape: Shape,
    lengths: Sequence[int],
    *,
    device: str,
    dtype: Any = torch.bfloat16,
    gates: str = "mixed",
    fresh: Sequence[int] = (),
    gone: Sequence[int] = (),
    tracked: dict[int, int] | None = None,
    bias: bool = False,
    equal_keys: bool = False,
    seed: int = 0,
) -> Step:
    """`fresh` sequences have no prefix, `gone` ones no slot; `tracked` says how many new tokens a checkpoint covers."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    tokens, heads = sum(lengths), shape.value_heads
    slots = random.Random(seed).sample(range(1, 2 * len(lengths) + 3), 2 * len(lengths))
    conv = torch.full((2 * len(lengths) + 3, shape.channels, shape.width - 1), NAN, dtype=dtype, device=device)
    state = torch.full((len(conv), heads, shape.values, shape.keys), NAN, device=device)
    for number, slot in enumerate(slots[: len(lengths)]):
        if number not in gone:
            state[slot] = 0 if number in fresh else normal(*state.shape[1:], kind=torch.float32)
        if number not in fresh and number not in gone:
            conv[slot] = normal(*conv.shape[1:])
    least, most, offset = GATES[gates]
    mixed_qkv = normal(tokens, shape.channels)
    if equal_keys:
        # every key is the same: the triangular system is as far from the identity as it gets
        keys = slice(shape.key_heads * shape.keys, 2 * shape.key_heads * shape.keys)
        mixed_qkv[:, keys] = mixed_qkv[:1, keys].abs() + 1
    prefixes = [0 if number in fresh else 64 + number for number in range(len(lengths))]
    after = [(tracked or {}).get(number) for number in range(len(lengths))]
    return Step(
        shape=shape,
        lengths=list(lengths),
        prefixes=prefixes,
        slots=[-1 if number in gone else slot for number, slot in enumerate(slots[: len(lengths)])],
        tracked=[None if each is None else prefix + each for each, prefix in zip(after, prefixes, strict=True)],
        track_slots=slots[len(lengths) :],
        mixed_qkv=mixed_qkv,
        a=normal(tokens, heads) + offset,
        b=normal(tokens, heads),
        conv_weights=normal(shape.channels, shape.width) * 0.5,
        bias=normal(shape.channels) if bias else None,
        A_log=torch.linspace(least, most, heads, device=device),
        dt_bias=normal(heads),
        conv=conv,
        state=state,
    )


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Properties that must not matter: padding rows, capacities, and the projections' row strides."""

    padding: int = 0
    more_tokens: int = 0
    max_sequences: int | None = None
    columns_between: int = 0
    span: int | None = None


class Launched:
    """A step on its own buffers; every run starts with the same pools and with NaN everywhere else."""

    def __init__(
        self,
        step: Step,
        tuning: form.Tuning | stepwise.Tuning,
        around: Surroundings = Surroundings(),
        chunk: int = CHUNK,
        modules: tuple[Any, Any] = (form, metadata),
    ) -> None:
        self.step, self.tuning, self.chunk = step, tuning, chunk
        self.form, self.metadata = modules
        rows = step.tokens + around.padding
        sequences = around.max_sequences or len(step.lengths)
        self.tables = self.metadata.Tables(rows + around.more_tokens, sequences, step.device, chunk, around.span)
        for table in self.tables.buffers:
            table.fill_(-(2**30))
        kind = step.mixed_qkv.dtype
        self.scratch = self.form.Scratch.for_rows(rows + around.more_tokens, self.tables, step.shape, kind, tuning)

        def poisoned(tensor: Any) -> Any:
            wide = torch.full((rows, tensor.shape[1] + around.columns_between), NAN, dtype=kind, device=step.device)
            wide[: len(tensor), : tensor.shape[1]] = tensor
            return wide[:, : tensor.shape[1]]

        self.inputs = [poisoned(tensor) for tensor in (step.mixed_qkv, step.a, step.b)]
        heads = (step.shape.value_heads, step.shape.values)
        self.output = torch.empty(rows, *heads, dtype=kind, device=step.device)
        self.conv, self.state = step.conv.clone(), step.state.clone()

    def restore(self) -> None:
        self.conv.copy_(self.step.conv)
        self.state.copy_(self.step.state)
        for tensor in (self.output, *(getattr(self.scratch, each.name) for each in dataclasses.fields(self.scratch))):
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
        self.form.extend(
            *self.inputs,
            shape=step.shape,
            conv_weights=step.conv_weights,
            bias=step.bias,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            conv=self.conv,
            state=self.state,
            tables=self.tables,
            scratch=self.scratch,
            output=self.output,
            tracking=self.tracking,
            tuning=self.tuning,
        )

    def after(self) -> After:
        return After(self.output.clone(), self.conv.clone(), self.state.clone())

    def run(self) -> After:
        self.restore()
        self.fill()
        self.extend()
        return self.after()


def wanted(step: Step, lengths: Sequence[int] | None = None, kind: Any = None) -> reference.Results:
    """Run the reference on the sequences with work, in order, on their first `lengths` tokens."""
    taken = step.with_work
    slots = [step.slots[number] for number in taken]
    kept = [step.lengths[number] if lengths is None else lengths[number] for number in taken]
    starts = [step.rows(number).start for number in taken]
    rows = [slice(start, start + length) for start, length in zip(starts, kept, strict=True)]
    fresh = torch.tensor([step.prefixes[number] == 0 for number in taken], device=step.device)

    def of_rows(tensor: Any) -> Any:
        return torch.cat([tensor[each] for each in rows])

    return reference.recurrent(
        reference.Inputs(
            lengths=kept,
            key_heads=step.shape.key_heads,
            mixed_qkv=of_rows(step.mixed_qkv),
            a=of_rows(step.a),
            b=of_rows(step.b),
            conv_weights=step.conv_weights,
            A_log=step.A_log,
            dt_bias=step.dt_bias,
            conv=step.conv[slots].masked_fill(fresh[:, None, None], 0),
            state=step.state[slots],
            bias=step.bias,
        ),
        kind,
    )


def of_each_head(step: Step, after: After) -> dict[str, Any]:
    """RMS(error) / RMS(reference) of every head of every sequence of one length, against fp64."""
    exact, shape = wanted(step, kind=torch.float64), step.shape
    output = (len(step.lengths), step.lengths[0], shape.value_heads, shape.values)
    pairs = {
        "output": (after.output[: step.tokens].view(output).transpose(1, 2), exact.output.view(output).transpose(1, 2)),
        "state": (after.state[step.slots], exact.state),
    }
    return {
        name: ((got - right).square().mean((2, 3)) / right.square().mean((2, 3))).sqrt().flatten()
        for name, (got, right) in pairs.items()
    }


def same_bits(one: Any, other: Any) -> bool:
    as_integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return bool((one.contiguous().view(as_integers) == other.contiguous().view(as_integers)).all())


def faults(
    step: Step,
    after: After,
    chunk: int = CHUNK,
    tolerance: float = reference.TOLERANCE,
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
        got = reference.Results(after.output[real], after.conv[slots], after.state[slots])
        errors = reference.errors(got, results)
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
            error = reference.relative(after.state[slot], there.state[place])
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
