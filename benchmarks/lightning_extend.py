# SPDX-License-Identifier: Apache-2.0
"""The kernels of lightning_extend on a GPU: random steps, each sequence alone, replays, and the time of a layer.

    python benchmarks/lightning_extend.py --cases 20
    PYTHONPATH=<unpacked wheel> python benchmarks/lightning_extend.py --cases 0 --times --json OUT

Steps are those of tests/kernels/test_lightning_extend.py at a model's sizes, and random ones, for the Triton form. With
a SGLang, the form that captures its kernels is held against the same kernels run eagerly, bit by bit, and timed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape, triton

REPOSITORY = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import random_steps  # noqa: E402
from tests.kernels import accuracy  # noqa: E402
from tests.kernels import lightning_extend_cases as cases  # noqa: E402
from tests.kernels.linear_extend_cases import Surroundings, faults_of_graphs, random_lengths, random_requests  # noqa: E402

# heads of Ling 2.5 and MiniCPM-SALA, and of one of four ranks
SHAPES = {"ling_2_5": Shape(32, 128), "a quarter": Shape(8, 128), "small": Shape(3, 32)}
KINDS = (torch.float32, torch.bfloat16, torch.float16)
OF_CHECKPOINT = accuracy.OF_SGLANGS * accuracy.TOLERANCE


def draw(shape: Shape, source: random.Random, most_tokens: int, seed: int, device: str = "cuda") -> cases.Step:
    lengths = random_lengths(source, random_steps.LENGTHS, most_tokens)
    some = [number for number in range(len(lengths)) if source.random() < 0.3]
    return cases.draw(
        shape,
        lengths,
        device=device,
        dtype=source.choice(KINDS),
        kept=source.choice((torch.float32, torch.bfloat16)),
        decays=source.choice(list(cases.DECAYS)),
        **random_requests(source, lengths, some),
        seed=seed,
    )


def faults(step: cases.Step, around: Surroundings, **others: Any) -> list[str]:
    def launched(each: cases.Step, beside: Surroundings) -> cases.Launched:
        return cases.Launched(each, triton.tuning_for(each.shape, each.q), beside)

    return list(faults_of_graphs(step, around, launched, OF_CHECKPOINT, **others))


class Layer:
    """One layer, its sequences as long as each other and without a prefix."""

    def __init__(self, tokens: int, sequences: int, kind: Any, shape: Shape, device: str = "cuda") -> None:
        self.lengths = torch.full((sequences,), tokens // sequences, device=device)
        self.slots = torch.arange(sequences, device=device)
        sizes = (tokens, shape.heads, shape.head)
        self.inputs = [torch.randn(*sizes, device=device).to(kind) for _ in range(3)]
        self.decay = torch.linspace(0.8, 0.004, shape.heads, device=device)
        self.state = torch.zeros(sequences, shape.heads, shape.head, shape.head, device=device)

    def by_form(self, form: Any) -> Callable[[], Any]:
        tables = form.Tables(len(self.inputs[0]), random_steps.MOST_SEQUENCES, self.state.device)
        tables.fill(self.lengths, self.slots, torch.zeros_like(self.lengths))
        return lambda: form.extend(
            *self.inputs, decay=self.decay, scale=cases.SCALE, state=self.state, tables=tables, tracking=False
        )

    def by_sglang(self) -> Callable[[], Any]:
        """Launch what SGLang launches for exactly this batch."""
        from sglang_bcg_fixes.kernels.lightning_extend import seg_la

        module = seg_la.sglang_module()
        bounds = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()
        metadata = module.SegLaMeta(
            batch_size=len(self.lengths),
            max_q_length=None,
            q_offsets=bounds,
            s_offsets=self.slots,
            q_lengths=bounds.diff(),
            s_scales=torch.zeros_like(self.slots, dtype=torch.bool),
        )
        return lambda: module.seg_la_fwd(
            *self.inputs, self.state, self.decay, metadata, softmax_scale=cases.SCALE
        ).flatten(1)


def timed() -> Iterator[dict[str, Any]]:
    has_sglang = importlib.util.find_spec("sglang") is not None
    for kind in KINDS[:2]:
        for tokens, sequences in random_steps.TIMED:
            layer = Layer(tokens, sequences, kind, SHAPES["ling_2_5"])
            found: dict[str, Any] = {"dtype": str(kind), "tokens": tokens, "sequences": sequences}
            works = {"triton": layer.by_form(triton)}
            if has_sglang:
                from sglang_bcg_fixes.kernels.lightning_extend import seg_la

                works |= {"seg_la": layer.by_form(seg_la), "SGLang's": layer.by_sglang()}
                found["seg_la has SGLang's bits"] = bool(torch.equal(works["seg_la"](), works["SGLang's"]()))
            yield {**found, **random_steps.times(works)}


def main() -> int:
    return random_steps.command(
        __doc__, SHAPES, draw, faults, timed, lambda row: row.get("seg_la has SGLang's bits") is False
    )


if __name__ == "__main__":
    sys.exit(main())
