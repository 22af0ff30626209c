# SPDX-License-Identifier: Apache-2.0
"""The kernel of short_conv_extend on a GPU: random steps, each sequence alone, replays, and the time of a layer.

    python benchmarks/short_conv_extend.py --cases 20
    PYTHONPATH=<unpacked wheel> python benchmarks/short_conv_extend.py --cases 0 --times --json OUT

Steps are those of tests/kernels/test_short_conv_extend.py at a model's sizes, and random ones. With a SGLang, its own
convolution is timed beside it: transposed, convolved and transposed back, as its layers do it.
"""

from __future__ import annotations

import importlib.util
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_bcg_fixes.kernels.linear_extend.serving import MOST_SEQUENCES
from sglang_bcg_fixes.kernels.short_conv_extend import Shape, triton

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import random_steps  # noqa: E402
from tests.kernels import accuracy  # noqa: E402
from tests.kernels import short_conv_extend_cases as cases  # noqa: E402
from tests.kernels.linear_extend_cases import Surroundings, faults_of_graphs, random_lengths  # noqa: E402

# LFM2-1.2B, LFM2-700M, one of eight ranks, and other widths
SHAPES = {
    "lfm2_1_2b": Shape(2048, 3),
    "lfm2_700m": Shape(1536, 3),
    "an eighth": Shape(192, 3),
    "wide": Shape(1024, 5),
    "narrow": Shape(48, 2),
}
KINDS = (torch.bfloat16, torch.float16)


def draw(shape: Shape, source: random.Random, most_tokens: int, seed: int, device: str = "cuda") -> cases.Step:
    lengths = random_lengths(source, random_steps.LENGTHS, most_tokens)
    return cases.draw(
        shape,
        lengths,
        device=device,
        dtype=source.choice(KINDS),
        fresh=[number for number in range(len(lengths)) if source.random() < 0.3],
        gone=[number for number in range(len(lengths)) if source.random() < 0.1],
        bias=source.random() < 0.3,
        seed=seed,
    )


def faults(step: cases.Step, around: Surroundings, **others: Any) -> list[str]:
    def launched(each: cases.Step, beside: Surroundings) -> cases.Launched:
        return cases.Launched(each, triton.tuning_for(each.shape), beside)

    return list(faults_of_graphs(step, around, launched, accuracy.TOLERANCE, **others))


class Layer:
    """One layer, its sequences as long as each other and without a prefix."""

    def __init__(self, tokens: int, sequences: int, shape: Shape, device: str = "cuda") -> None:
        def normal(*sizes: int) -> Any:
            return torch.randn(*sizes, device=device).bfloat16()

        self.shape = shape
        self.lengths = torch.full((sequences,), tokens // sequences, device=device)
        self.slots = torch.arange(sequences, device=device)
        self.inputs, self.weights = normal(tokens, shape.channels), normal(shape.channels, shape.width)
        self.conv = normal(sequences, shape.channels, shape.width - 1)

    def by_us(self) -> Callable[[], Any]:
        rows, tuning = len(self.inputs), triton.tuning_for(self.shape)
        tables = triton.Tables(rows, MOST_SEQUENCES, self.conv.device)
        tables.fill(self.lengths, self.slots, torch.zeros_like(self.lengths))
        scratch = triton.Scratch.for_rows(rows, tables, self.shape, self.inputs.dtype, tuning)
        output = torch.empty_like(self.inputs)
        return lambda: triton.extend(
            self.inputs,
            shape=self.shape,
            conv_weights=self.weights,
            bias=None,
            conv=self.conv,
            tables=tables,
            scratch=scratch,
            output=output,
            tuning=tuning,
        )

    def by_sglang(self) -> Callable[[], Any]:
        from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn

        bounds = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()
        slots, fresh = self.slots.int(), torch.zeros_like(self.slots, dtype=torch.bool)
        return lambda: causal_conv1d_fn(
            self.inputs.transpose(0, 1).contiguous(),
            self.weights,
            None,
            query_start_loc=bounds,
            cache_indices=slots,
            has_initial_state=fresh,
            conv_states=self.conv,
            activation=None,
        ).transpose(0, 1)


def timed() -> Iterator[dict[str, Any]]:
    has_sglang = importlib.util.find_spec("sglang") is not None
    for tokens, sequences in random_steps.TIMED:
        layer = Layer(tokens, sequences, SHAPES["lfm2_1_2b"])
        works = {"triton": layer.by_us(), **({"SGLang's": layer.by_sglang()} if has_sglang else {})}
        yield {"tokens": tokens, "sequences": sequences, **random_steps.times(works)}


def main() -> int:
    return random_steps.command(__doc__, SHAPES, draw, faults, timed)


if __name__ == "__main__":
    sys.exit(main())
