# SPDX-License-Identifier: Apache-2.0
"""Random calls of the four operations, for every implementation on every device.

A case is drawn from a `random.Random`, so a seed reproduces it. Each output is a view into a larger buffer filled with
a sentinel, and whole buffers are compared, so writes outside an output and missing writes are differences.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import torch

from sglang_bcg_fixes.kernels.fa_metadata import jobs

Tensor = torch.Tensor

JOBS: dict[str, Any] = {
    job.operation: job for job in (jobs.FaMetadata, jobs.DraftExpand, jobs.VerifyExpand, jobs.LocalAttention)
}
OPERATIONS = tuple(JOBS)
SENTINEL = -(2**30)
INDEX = (torch.int32, torch.int64)
MARGIN = 3


@dataclasses.dataclass
class Call:
    """One operation and its arguments; outputs are views into `buffers`."""

    operation: str
    inputs: dict[str, Any]
    outputs: Mapping[str, Tensor | None]
    buffers: dict[str, Tensor]

    def run(self, implementation: Any) -> None:
        getattr(implementation, self.operation)(JOBS[self.operation](**self.inputs, **self.outputs))

    def __str__(self) -> str:
        def told(value: Any) -> str:
            return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else str(value)

        return ", ".join(f"{name}={told(value)}" for name, value in {**self.inputs, **self.outputs}.items())

    def tensors(self) -> dict[str, Tensor]:
        """Collect everything that a call could have changed, inputs included."""
        inputs = {name: value for name, value in self.inputs.items() if isinstance(value, Tensor)}
        return inputs | {f"{name}'s buffer": buffer for name, buffer in self.buffers.items()}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Upper bounds of a case: the interpreter is a thousand times slower than a GPU."""

    rows: int = 12
    tokens: int = 700
    locations: int = 1200
    draft_tokens: int = 9


LARGE = Sizes(rows=2500, tokens=262144, locations=20000, draft_tokens=64)
# a GPU need not hold more than this many elements of each table
MOST_ELEMENTS = 2**26


class Drawing:
    """A case in the making."""

    def __init__(self, chance: random.Random, sizes: Sizes, device: str) -> None:
        self.chance = chance
        self.sizes = sizes
        self.device = device
        self.generator = torch.Generator().manual_seed(chance.randrange(2**31))
        self.buffers: dict[str, Tensor] = {}

    def maybe(self, probability: float = 0.5) -> bool:
        return self.chance.random() < probability

    def size(self, most: int) -> int:
        """Draw a size: small, odd or large."""
        return self.chance.choice([0, 1, 2, self.chance.randint(0, min(most, 16)), self.chance.randint(0, most)])

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randint(low, high, shape, generator=self.generator)
        return values.to(dtype or self.chance.choice(INDEX)).to(self.device)

    def vector(self, name: str, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
        self.buffers[name] = torch.full((length + 2 * MARGIN,), SENTINEL, dtype=dtype, device=self.device)
        # an aligned beginning as well as another
        first = self.chance.choice([0, MARGIN])
        return self.buffers[name][first : first + length]

    def table(self, name: str, rows: int, width: int) -> Tensor:
        room = width + self.chance.choice([0, 1, 2, MARGIN, 4])
        self.buffers[name] = torch.full((rows + 1, room), SENTINEL, dtype=torch.int32, device=self.device)
        return self.buffers[name][: rows + self.chance.choice([0, 1]), :width]

    def req_to_token(self, requests: int, tokens: int, slots: int) -> Tensor:
        """Draw slots in any order, some missing; past each row are slots outside any mapping."""
        room = torch.full((requests, tokens + self.chance.choice([0, 1, 2, 4])), 2**30, dtype=torch.int32)
        room[:, :tokens] = self.slots(slots, requests, tokens)
        return room.to(self.device)[:, :tokens]

    def slots(self, most: int, *shape: int) -> Tensor:
        """Draw slots; in a third of the cases every fifth is missing."""
        values = torch.randint(0, most, shape, generator=self.generator)
        if self.maybe(0.3):
            values[torch.rand(shape, generator=self.generator) < 0.2] = -1
        return values

    def lengths(self, rows: int, tokens: int, least: int = 0) -> Tensor:
        """Draw lengths: ragged, mostly short, or at page boundaries; padded rows have length 1."""
        kind = self.chance.choice(["any", "few long", "pages", "short"])
        top = {"any": tokens, "few long": min(tokens, 40), "pages": tokens, "short": min(tokens, 3)}[kind]
        values = torch.randint(least, max(top, least) + 1, (rows,), generator=self.generator)
        if kind == "pages":
            values = (values // 16 * 16).clamp(min=least)
        if kind == "few long" and rows:
            values[:: max(rows // 3, 1)] = max(tokens, least)
        padded = self.chance.choice([0, 0, rows // 3])
        if padded:
            values[rows - padded :] = max(1, least)
        return values.to(self.chance.choice(INDEX)).to(self.device)


def draw(operation: str, chance: random.Random, sizes: Sizes = Sizes(), device: str = "cpu") -> Call:
    drawing = Drawing(chance, sizes, device)
    inputs, outputs = {
        "fa_metadata": draw_fa_metadata,
        "draft_expand": draw_draft_expand,
        "verify_expand": draw_verify_expand,
        "local_attention": draw_local_attention,
    }[operation](drawing)
    return Call(operation, inputs, outputs, drawing.buffers)


Drawn = tuple[dict[str, Any], dict[str, Any]]


def draw_fa_metadata(drawing: Drawing) -> Drawn:
    chance, sizes = drawing.chance, drawing.sizes
    bs, page_size = drawing.size(sizes.rows), 2 ** chance.randint(0, 7)
    tokens = min(max(drawing.size(sizes.tokens), 1), MOST_ELEMENTS // max(bs, 1))
    width = chance.choice([-(-tokens // page_size), tokens // page_size, drawing.size(tokens), 0])
    requests, slots = chance.randint(1, 6), chance.randint(1, 3 * sizes.tokens)
    # some lengths are past the context
    inputs: dict[str, Any] = {
        "seq_lens": drawing.lengths(bs, tokens + chance.choice([0, 0, 9])),
        "req_pool_indices": drawing.integers(0, requests, bs + chance.choice([0, 2])),
        "req_to_token": drawing.req_to_token(requests, tokens, slots),
        "page_size": page_size,
        "delta": chance.choice([0, 0, 1, 5]),
        "drop_last": drawing.maybe(0.3),
        "zero_tail": drawing.maybe(),
    }
    outputs: dict[str, Any] = {"cu_seqlens_k": None, "page_table": None}
    in_place = inputs["seq_lens"].dtype == torch.int32 and drawing.maybe()
    outputs["cache_seqlens"] = inputs["seq_lens"] if in_place else drawing.vector("cache_seqlens", bs)
    if drawing.maybe(0.8):
        outputs["cu_seqlens_k"] = drawing.vector("cu_seqlens_k", bs + 1)
    if drawing.maybe(0.9):
        outputs["page_table"] = drawing.table("page_table", bs, width)
    if drawing.maybe(0.2):
        inputs["row_start"] = drawing.integers(0, tokens + 2, bs)
    if drawing.maybe(0.7):
        outputs["cu_seqlens_q"] = drawing.vector("cu_seqlens_q", bs + 1)
        has_own = drawing.maybe()
        inputs |= {"extend_lens": drawing.integers(0, 9, bs)} if has_own else {"q_stride": chance.randint(1, 64)}
    if drawing.maybe():
        add_window(drawing, inputs, outputs, bs, width, slots)
    return inputs, outputs


def add_window(
    drawing: Drawing, inputs: dict[str, Any], outputs: dict[str, Any], bs: int, width: int, slots: int
) -> None:
    inputs["mapping"] = drawing.integers(-1, slots, slots, dtype=torch.int64)
    has_table = outputs["page_table"] is not None and drawing.maybe(0.8)
    if has_table:
        outputs["swa_page_table"] = drawing.table("swa_page_table", bs, width)
    if not has_table or drawing.maybe():
        new = drawing.size(drawing.sizes.locations)
        room = new + drawing.chance.choice([0, 1, 700])
        inputs["out_cache_loc"] = drawing.slots(slots, new).to(drawing.chance.choice(INDEX)).to(drawing.device)
        in_place = inputs["out_cache_loc"].dtype == torch.int64 and room == new and drawing.maybe()
        out = inputs["out_cache_loc"] if in_place else drawing.vector("swa_out_cache_loc", room, torch.int64)
        outputs["swa_out_cache_loc"] = out


def draw_draft_expand(drawing: Drawing) -> Drawn:
    chance = drawing.chance
    requests, topk, steps = drawing.size(drawing.sizes.rows), chance.randint(1, 8), chance.randint(1, 9)
    length, bs = chance.randint(1, steps), requests * topk
    # neighbours share a page more often than not
    slots = drawing.integers(0, 5, bs, steps).cumsum(1) + drawing.integers(0, 1000, bs, 1)
    inputs = {
        "seq_lens": drawing.lengths(requests, drawing.sizes.tokens),
        "out_cache_loc": slots.flatten().to(chance.choice(INDEX)),
        "page_size": 2 ** chance.randint(0, 7),
        "topk": topk,
        "steps": steps,
        "length": length,
        "zero_tail": drawing.maybe(),
    }
    outputs = {
        "cache_seqlens": drawing.vector("cache_seqlens", bs),
        "page_table": drawing.table("page_table", bs, length + chance.choice([0, 1, 20])),
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if drawing.maybe():
            outputs[name] = drawing.vector(name, bs + 1)
    return inputs, outputs


def draw_verify_expand(drawing: Drawing) -> Drawn:
    chance, sizes = drawing.chance, drawing.sizes
    draft_tokens = chance.randint(1, sizes.draft_tokens)
    # a flag for each token that each draft token could see
    requests = drawing.size(min(sizes.rows, 200))
    tokens = min(max(drawing.size(sizes.tokens), 1), MOST_ELEMENTS // max(requests * draft_tokens, 1))
    lengths = drawing.lengths(requests, tokens)
    live = chance.choice([requests, requests, chance.randint(0, requests)])
    flags = int((lengths[:live].long() + draft_tokens).sum()) * draft_tokens
    pool = chance.randint(1, 6)
    inputs: dict[str, Any] = {
        "seq_lens": lengths,
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "req_pool_indices": drawing.integers(0, pool, requests),
        "req_to_token": drawing.req_to_token(pool, tokens + chance.choice([0, draft_tokens]), 1000),
        # one at least: padded rows look at the first
        "custom_mask": drawing.integers(0, 2, max(flags, 1), dtype=torch.bool),
        "draft_tokens": draft_tokens,
    }
    if live < requests or drawing.maybe():
        inputs["live_rows"] = live * draft_tokens
    bs = requests * draft_tokens
    outputs = {
        "cache_seqlens": drawing.vector("cache_seqlens", bs),
        "cu_seqlens_k": drawing.vector("cu_seqlens_k", bs + 1),
        "page_table": drawing.table("page_table", bs, draft_tokens + chance.choice([0, 0, 3])),
    }
    if drawing.maybe():
        outputs["cu_seqlens_q"] = drawing.vector("cu_seqlens_q", bs + 1)
    return inputs, outputs


def draw_local_attention(drawing: Drawing) -> Drawn:
    chance, sizes = drawing.chance, drawing.sizes
    bs, page_size = drawing.size(sizes.rows), 2 ** chance.randint(0, 7)
    chunk = page_size * chance.randint(1, max(sizes.tokens // page_size // 4, 1))
    chunk = min(chunk, max(MOST_ELEMENTS // max(bs, 1) // page_size, 1) * page_size)
    tokens, pool, slots = max(drawing.size(sizes.tokens), 1), chance.randint(1, 6), chance.randint(1, 3 * sizes.tokens)
    inputs: dict[str, Any] = {
        "seq_lens": drawing.lengths(bs, tokens + chance.choice([0, 5])),
        "req_pool_indices": drawing.integers(0, pool, bs),
        "req_to_token": drawing.req_to_token(pool, tokens, slots),
        "chunk": chunk,
        "page_size": page_size,
        "zero_tail": drawing.maybe(),
    }
    if drawing.maybe():
        inputs["mapping"] = drawing.integers(-1, slots, slots, dtype=torch.int64)
    outputs = {
        "seqused": drawing.vector("seqused", bs),
        "block_table": drawing.table("block_table", bs, chunk // page_size + chance.choice([0, 2])),
    }
    if drawing.maybe():
        outputs["cu_seqlens_q"] = drawing.vector("cu_seqlens_q", bs + 1)
    return inputs, outputs


def differences(operation: str, seed: int, implementation: Any, reference: Any, sizes: Sizes, device: str) -> list[str]:
    call = draw(operation, random.Random(seed), sizes, device)
    return [f"seed {seed}, {line}" for line in differences_in(call, implementation, reference)]


def differences_in(call: Call, implementation: Any, reference: Any) -> list[str]:
    """List where the implementation and the reference differ; the deep copy keeps aliases of inputs and outputs."""
    other = copy.deepcopy(call)
    call.run(reference)
    other.run(implementation)
    found = other.tensors()
    return [
        f"{call.operation}: {name} differs in {int((found[name] != value).sum())} of {value.numel()}, {call}"
        for name, value in call.tensors().items()
        if not torch.equal(found[name], value)
    ]
