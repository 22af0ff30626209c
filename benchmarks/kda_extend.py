# SPDX-License-Identifier: Apache-2.0
"""The kernels of kda_extend on a GPU: random steps, each sequence alone, replays, and the time of a layer.

    python benchmarks/kda_extend.py --cases 20
    PYTHONPATH=<unpacked wheel> python benchmarks/kda_extend.py --cases 0 --times --json OUT

Steps are those of tests/kernels/test_kda_extend.py at a model's sizes, and random ones. With a SGLang, its own
convolution and delta rule are timed beside them, launched for exactly this batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_bcg_fixes.kernels.kda_extend import Shape, triton
from sglang_bcg_fixes.kernels.linear_extend.metadata import Tables
from sglang_bcg_fixes.kernels.linear_extend.serving import MOST_SEQUENCES

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import random_steps  # noqa: E402
from tests.kernels import accuracy  # noqa: E402
from tests.kernels import kda_extend_cases as cases  # noqa: E402
from tests.kernels.linear_extend_cases import Surroundings, faults_of_graphs, random_lengths, random_requests  # noqa: E402

# Kimi-Linear-48B-A3B, one of four ranks, gates with a lower bound as Kimi K3 has them, and small ones
SHAPES = {
    "kimi_linear_48b": Shape(32, 128, 128, 4),
    "a quarter": Shape(8, 128, 128, 4),
    "with a lower bound": Shape(8, 128, 128, 4, -5.0),
    "small": Shape(3, 32, 64, 3),
    "16 keys": Shape(2, 16, 32, 4),
    "64 keys": Shape(4, 64, 64, 4),
}
KINDS = (torch.bfloat16, torch.float16)
OF_CHECKPOINT = accuracy.OF_SGLANGS * accuracy.TOLERANCE
BACKEND = "sglang.srt.layers.attention.linear.kda_backend"


def draw(shape: Shape, source: random.Random, most_tokens: int, seed: int, device: str = "cuda") -> cases.Step:
    lengths = random_lengths(source, random_steps.LENGTHS, most_tokens)
    some = [number for number in range(len(lengths)) if source.random() < 0.3]
    return cases.draw(
        shape,
        lengths,
        device=device,
        # with few numbers in bfloat16, one that rounds badly is half of a result
        dtype=torch.float16 if shape.keys < 128 else source.choice(KINDS),
        kept=source.choice((torch.float32, torch.bfloat16)),
        gates=source.choice(list(cases.GATES)),
        **random_requests(source, lengths, some),
        bias=source.random() < 0.3,
        is_squashed=source.random() < 0.3,
        seed=seed,
    )


def faults(step: cases.Step, around: Surroundings, **others: Any) -> list[str]:
    def launched(each: cases.Step, beside: Surroundings) -> cases.Launched:
        return cases.Launched(each, triton.Tuning(), beside)

    return list(faults_of_graphs(step, around, launched, OF_CHECKPOINT, **others))


class Layer:
    """One layer, its sequences as long as each other and without a prefix."""

    def __init__(
        self, tokens: int, sequences: int, shape: Shape, kind: Any = torch.bfloat16, device: str = "cuda"
    ) -> None:
        def normal(*sizes: int, kind: Any = kind) -> Any:
            return torch.randn(*sizes, device=device).to(kind)

        self.shape = shape
        self.lengths = torch.full((sequences,), tokens // sequences, device=device)
        self.slots = torch.arange(sequences, device=device)
        self.mixed_qkv, self.a, self.b = (
            normal(tokens, shape.channels),
            normal(tokens, shape.heads * shape.keys),
            normal(tokens, shape.heads),
        )
        self.conv_weights = normal(shape.channels, shape.width) * 0.5
        self.A_log = torch.linspace(-4.0, 2.0, shape.heads, device=device)
        self.dt_bias = normal(shape.heads * shape.keys, kind=torch.float32)
        self.conv = normal(sequences, shape.width - 1, shape.channels).transpose(1, 2)
        self.state = torch.zeros(sequences, shape.heads, shape.values, shape.keys, device=device)

    def call(self, tuning: triton.Tuning) -> triton.Call:
        rows = len(self.mixed_qkv)
        tables = Tables(rows, MOST_SEQUENCES, self.state.device)
        tables.fill(self.lengths, self.slots, torch.zeros_like(self.lengths))
        return triton.Call(
            self.mixed_qkv,
            self.a,
            self.b,
            shape=self.shape,
            conv_weights=self.conv_weights,
            bias=None,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            is_squashed=False,
            conv=self.conv,
            state=self.state,
            tables=tables,
            scratch=triton.Scratch.for_rows(rows, tables, self.shape, self.mixed_qkv.dtype, tuning),
            output=self.mixed_qkv.new_empty(rows, self.shape.heads, self.shape.values),
            tracking=False,
            tuning=tuning,
        )

    def by_us(self) -> Callable[[], Any]:
        return self.call(triton.tuning_for(len(self.mixed_qkv))).launch

    def by_sglang(self) -> Callable[[], Any]:
        """Launch what SGLang's backend launches."""
        backend = importlib.import_module(BACKEND)
        kernel = backend.TritonKDAKernel()
        shape, lengths = self.shape, self.lengths.tolist()
        bounds = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()
        slots, fresh = self.slots.int(), torch.zeros_like(self.slots, dtype=torch.bool)
        of_keys = shape.heads * shape.keys
        sizes = [of_keys, of_keys, shape.heads * shape.values]

        def work() -> Any:
            mixed = backend.causal_conv1d_fn(
                self.mixed_qkv.transpose(0, 1),
                self.conv_weights,
                None,
                activation="silu",
                conv_states=self.conv,
                has_initial_state=fresh,
                cache_indices=slots,
                query_start_loc=bounds,
                seq_lens_cpu=lengths,
            ).transpose(0, 1)
            q, k, v = (part.unflatten(1, (shape.heads, -1))[None] for part in mixed.split(sizes, 1))
            return kernel.extend(
                q=q,
                k=k,
                v=v,
                g=self.a.unflatten(1, (shape.heads, -1))[None],
                beta=self.b.float().sigmoid()[None],
                ssm_states=self.state,
                cache_indices=slots,
                query_start_loc=bounds,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                lower_bound=shape.lower_bound,
            )

        return work


def has_sglangs() -> bool:
    if importlib.util.find_spec("sglang") is None:
        return False
    return hasattr(importlib.import_module(BACKEND), "TritonKDAKernel")


def timed() -> Iterator[dict[str, Any]]:
    for tokens, sequences in random_steps.TIMED:
        layer = Layer(tokens, sequences, SHAPES["kimi_linear_48b"])
        works = {"triton": layer.by_us(), **({"SGLang's": layer.by_sglang()} if has_sglangs() else {})}
        yield {"tokens": tokens, "sequences": sequences, **random_steps.times(works)}


def main() -> int:
    return random_steps.command(__doc__, SHAPES, draw, faults, timed)


if __name__ == "__main__":
    sys.exit(main())
