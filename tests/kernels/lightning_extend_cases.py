# SPDX-License-Identifier: Apache-2.0
"""Steps of lightning attention that the Triton form must get right, with NaN in all memory that it must not use."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch

from sglang_bcg_fixes.kernels.lightning_extend import Shape
from sglang_bcg_fixes.kernels.lightning_extend import triton as form
from sglang_bcg_fixes.kernels.linear_extend import metadata
from sglang_bcg_fixes.kernels.linear_extend.metadata import CHUNK
from tests.kernels import accuracy, lightning_reference, linear_extend_cases
from tests.kernels.linear_extend_cases import NAN, NOTHING, Surroundings, requests, slots_of

SCALE = 0.3
# of the first head and the last: as published, hardly at all, all at once
DECAYS = {"mixed": (0.8, 0.004), "near 0": (1e-5, 1e-6), "at once": (90.0, 30.0)}


@dataclasses.dataclass(frozen=True)
class Step(linear_extend_cases.Step):
    """Queries, keys and values of every token [tokens, heads * head], and each head's decay; there are no windows."""

    q: Any
    k: Any
    v: Any
    decay: Any

    @property
    def projections(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v

    @property
    def weights(self) -> dict[str, Any]:
        return {"decay": self.decay}

    @property
    def output_sizes(self) -> tuple[int, int]:
        return self.shape.heads, self.shape.head

    def with_projections(self, *projections: Any, **changed: Any) -> Step:
        return dataclasses.replace(self, **dict(zip("qkv", projections, strict=True)), **changed)

    def recurrent(self, kind: Any) -> accuracy.Results:
        q, k, v = (each.unflatten(1, self.output_sizes) for each in self.projections)
        given = lightning_reference.Inputs(self.lengths, q, k, v, self.decay, SCALE, self.state)
        output, state = lightning_reference.recurrent(given, kind)
        return accuracy.Results(output, self.conv, state)


def draw(
    shape: Shape,
    lengths: Sequence[int],
    *,
    device: str = "cpu",
    dtype: Any = torch.float32,
    kept: Any = torch.float32,
    decays: str = "mixed",
    fresh: Sequence[int] = (),
    gone: Sequence[int] = (),
    tracked: dict[int, int] | None = None,
    seed: int = 0,
) -> Step:
    """Draw a step; `requests` says what `fresh`, `gone` and `tracked` are, `kept` is the dtype of states."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, kind: Any = dtype) -> Any:
        return torch.randn(*sizes, generator=source, device=device).to(kind)

    who = requests(lengths, fresh, gone, tracked, seed)
    sizes = (slots_of(lengths), shape.heads, shape.head, shape.head)
    state = torch.full(sizes, NAN, dtype=kept, device=device)
    for number, slot in enumerate(who["slots"]):
        if number not in gone and number not in fresh:
            state[slot] = normal(*sizes[1:], kind=kept)
    first, last = DECAYS[decays]
    q, k, v = (normal(sum(lengths), shape.heads * shape.head) for _ in range(3))
    return Step(
        shape=shape,
        **who,
        conv=torch.zeros(sizes[0], 1, 1, device=device),
        state=state,
        **{"q": q, "k": k, "v": v},
        decay=torch.linspace(first, last, shape.heads, device=device),
    )


def as_others(of: Any) -> Any:
    """Show a form as those of other layers are called."""

    def extend(*projections: Any, shape: Shape, conv: Any, output: Any, **others: Any) -> None:
        by_heads = (each.unflatten(1, (shape.heads, shape.head)) for each in projections)
        of.run(*by_heads, output.flatten(1), scale=SCALE, **others)

    return types.SimpleNamespace(extend=extend, Scratch=of.Scratch)


class Launched(linear_extend_cases.Launched):
    """A step on the Triton form, or a changed one."""

    def __init__(
        self,
        step: Step,
        tuning: Any,
        around: Surroundings = NOTHING,
        chunk: int = CHUNK,
        modules: tuple[Any, Any] = (form, metadata),
    ) -> None:
        super().__init__(step, tuning, around, chunk, (as_others(modules[0]), modules[1]))
