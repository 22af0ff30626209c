# SPDX-License-Identifier: Apache-2.0
"""Steps of a released FlashAttentionBackend, on requests laid out by hand, and what it fills for each of them."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.kernels.flash_backend import Backend, Batch, Setting

CONTEXT = 150
REQUESTS, ROOM = 6, CONTEXT + 4
DRAFT_TOKENS, STEPS, TOPK, TREE = 4, 3, 3, 5
# the last row of a graph is padding: one token of nobody's request
LENGTHS = (37, 1, 64, 100, 1)
ROWS = (3, 5, 1, 4, 0)
PREFIX = (30, 0, 0, 99, 0)
ENCODER = (9, 40, 1, 17, 0)
CHUNK = 32
NUMBERS = ("max_seq_len_q", "max_seq_len_k")
VECTORS = ("cache_seqlens_int32", "cu_seqlens_q", "cu_seqlens_k", "swa_out_cache_loc")
TABLES = ("page_table", "swa_page_table")


@dataclasses.dataclass(frozen=True)
class Step:
    """One call, and in which lengths: those of SGLang are int32 before 0.5.13 and int64 since."""

    name: str
    mode: str
    graph: bool
    page_size: int
    has_pool: bool = False
    topk: int = 0
    step: int = 0
    drafts: bool = False
    window: int | None = None
    prefix: bool = True
    told: str = "tensor"
    chunk: int | None = None
    encoder: bool = False
    # how many of the requests below
    rows: int = 5
    dtype: torch.dtype = torch.int64

    @property
    def setting(self) -> Setting:
        new = TREE if self.topk > 1 else DRAFT_TOKENS
        return Setting(
            CONTEXT,
            self.page_size,
            topk=self.topk,
            steps=STEPS if self.drafts else 0,
            draft_tokens=new if self.drafts else None,
            step=self.step,
            window=self.window,
            chunk=self.chunk,
            encoder=self.encoder,
        )


@dataclasses.dataclass(frozen=True)
class Release:
    """Features that a release has, and cases that it handles right."""

    version_1: bool
    many_encoders: bool
    local_pages: bool
    local_pages_in_pool: bool


def odd_attention(release: Release) -> Iterator[Step]:
    """Local attention where it comes out right, and encoders."""
    for graph, page_size, has_pool in itertools.product((False, True), (1, 16), (False, True)):
        in_pages = release.local_pages_in_pool if graph and has_pool else graph or release.local_pages
        if page_size == 1 or in_pages:
            name = f"{'replay' if graph else 'eager'}, page {page_size}{', pool' * has_pool}, local"
            more: dict[str, Any] = {"graph": graph, "page_size": page_size, "has_pool": has_pool, "chunk": CHUNK}
            yield Step(f"{name}, decode", "DECODE", **more)
            if not graph:
                yield Step(f"{name}, draft decode", "DECODE", topk=1, drafts=True, step=1, **more)
    for graph in (False, True):
        more = {"graph": graph, "page_size": 1, "encoder": True, "rows": 5 if release.many_encoders else 1}
        yield Step(f"{'replay' if graph else 'eager'}, encoder, decode", "DECODE", **more)
    yield Step("eager, encoder, extend", "EXTEND", **{**more, "graph": False})


def steps(release: Release) -> Iterator[Step]:
    yield from odd_attention(release)
    version_1 = release.version_1
    for page_size in (1, 16):
        for graph in (False, True):
            way = f"{'replay' if graph else 'eager'}, page {page_size}"
            for has_pool in (False, True):
                more: dict[str, Any] = {"graph": graph, "page_size": page_size, "has_pool": has_pool}
                pool = ", pool" if has_pool else ""
                drafts: dict[str, Any] = {"topk": 1, "drafts": True, **more}
                yield Step(f"{way}{pool}, decode", "DECODE", **more)
                yield Step(f"{way}{pool}, decode, int32", "DECODE", dtype=torch.int32, **more)
                yield Step(f"{way}{pool}, draft decode", "DECODE", step=1, **drafts)
                yield Step(f"{way}{pool}, verify", "TARGET_VERIFY", **drafts)
                yield Step(f"{way}{pool}, draft extend", "DRAFT_EXTEND_V2", **drafts)
                if version_1:
                    yield Step(f"{way}{pool}, draft extend 1", "DRAFT_EXTEND", **drafts)
                if not graph:
                    yield Step(f"{way}{pool}, extend", "EXTEND", **more)
                    yield Step(f"{way}{pool}, extend, no prefix", "EXTEND", prefix=False, **more)
                    yield Step(f"{way}{pool}, mixed", "MIXED", **more)
            tree: dict[str, Any] = {"graph": graph, "page_size": page_size, "topk": TOPK, "drafts": True}
            for step in range(STEPS - 1):
                yield Step(f"{way}, draft decode {step} of a tree", "DECODE", step=step, **tree)
            yield Step(f"{way}, verify a tree", "TARGET_VERIFY", **tree)
            if page_size == 1:
                yield Step(f"{way}, verify a tree, window", "TARGET_VERIFY", window=20, **tree)
            if graph:
                more = {"topk": 1, "drafts": True, "graph": True, "page_size": page_size}
                yield Step(f"{way}, draft extend, told on the host", "DRAFT_EXTEND_V2", told="host", **more)
                yield Step(f"{way}, draft extend, not told", "DRAFT_EXTEND_V2", told="", **more)


class World:
    """The table of requests and the mapping of slots, alike in every process."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        pages = torch.randperm(REQUESTS * 10, generator=self.random) + 1
        slots = (pages[:, None] * 16 + torch.arange(16)).view(REQUESTS, -1)
        self.table = torch.zeros(REQUESTS, ROOM, dtype=torch.int32)
        self.table[1:] = slots[1:, :ROOM]
        order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(REQUESTS * 10, generator=self.random) + 1])
        mapping = (order[:, None] * 16 + torch.arange(16)).flatten()
        self.mapping = torch.cat([mapping, torch.tensor([-1])])

    def backend(self, step: Step) -> Backend:
        return Backend(step.setting, self.table, self.mapping if step.has_pool else None)

    def batch(self, step: Step) -> Batch:
        count = step.rows
        verify_tree = step.mode == "TARGET_VERIFY" and step.topk > 1
        lengths = torch.tensor(LENGTHS[:count], dtype=step.dtype)
        rows = torch.tensor(ROWS[:count])
        prefix = torch.tensor(PREFIX[:count] if step.prefix else [0] * count)
        has_new = "EXTEND" in step.mode or step.mode == "MIXED"
        new = (lengths - prefix).to(step.dtype) if step.mode in ("EXTEND", "MIXED") else lengths.clone()
        if step.mode.startswith("DRAFT_EXTEND"):
            # padded rows are full of new tokens
            new, prefix = torch.full_like(lengths, DRAFT_TOKENS), (lengths - DRAFT_TOKENS).clamp(min=0)
        slots = self.table[rows]
        width = {"TARGET_VERIFY": TREE if step.topk > 1 else DRAFT_TOKENS}.get(step.mode, 1)
        if step.mode == "DECODE" and step.drafts:
            out = self.branch_slots(step, rows)
        elif has_new:
            pieces = zip(slots, prefix.tolist(), new.tolist(), strict=True)
            out = torch.cat([row[first : first + count] for row, first, count in pieces])
        else:
            out = slots[:, :width].flatten()
        return Batch(
            step.mode,
            lengths,
            rows,
            out_cache_loc=out.long(),
            spec_info=self.spec_info(step, lengths, new, verify_tree) if step.drafts else None,
            prefix_lens=prefix.tolist() if has_new else None,
            extend_lens=new if has_new else None,
            encoder_lens=torch.tensor(ENCODER[:count]) if step.encoder else None,
        )

    def branch_slots(self, step: Step, rows: torch.Tensor) -> torch.Tensor:
        """Give each branch as many slots as there are steps, the last on another page."""
        branches = len(rows) * max(step.topk, 1)
        page = torch.randint(1, 50, (branches, 2), generator=torch.Generator().manual_seed(1))
        places = torch.tensor([14, 15, 0])[:STEPS]
        return (torch.stack([page[:, 0], page[:, 0], page[:, 1]], dim=1)[:, :STEPS] * 16 + places).flatten()

    def spec_info(self, step: Step, lengths: torch.Tensor, new: torch.Tensor, tree: bool) -> Any:
        accepted = torch.tensor([2, 1, 4, 3, 1])
        found = types.SimpleNamespace(
            num_tokens_per_req=DRAFT_TOKENS,
            num_accept_tokens=accepted,
            num_accept_tokens_cpu=accepted.tolist(),
            num_accepted_tokens=accepted,
            num_accepted_tokens_cpu=accepted.tolist(),
            positions=torch.zeros(len(lengths) * TREE, dtype=torch.int64),
        )
        if step.told == "tensor":
            found.extend_seq_lens_tensor = new
            found.extend_seq_lens_cpu = new.tolist()
        elif step.told == "host":
            found.extend_seq_lens_cpu = new.tolist()
        if tree:
            # in a graph the last request is padding, which the mask says nothing about
            live = len(lengths) - step.graph
            flags = int((lengths[:live] + TREE).sum()) * TREE
            found.custom_mask = torch.rand(flags, generator=torch.Generator().manual_seed(2)) < 0.6
            found.positions = found.positions[: live * TREE]
        return found

    def run(self, step: Step) -> dict[str, Any]:
        backend, batch = self.backend(step), self.batch(step)
        if step.graph:
            captured = dataclasses.replace(batch, seq_lens=torch.ones_like(batch.seq_lens))
            backend.capture(captured)
            backend.replay(batch)
        else:
            backend.eager(batch)
        found = told(backend.found, step.page_size)
        if backend.expanded is not None and step.topk > 1:
            # slots, but where a draft's branches are listed by pages
            size = step.page_size if step.mode == "DECODE" else 1
            found |= {f"expanded {name}": value for name, value in told(backend.expanded, size).items()}
        if backend.found.local_attn_metadata is not None:
            found |= told_locally(backend.found.local_attn_metadata, step)
        if step.encoder:
            found |= told_of_encoder(backend.found, step)
        if backend.found.swa_spec_metadata is not None:
            found |= {f"window {name}": value for name, value in told(backend.found.swa_spec_metadata, 1).items()}
        return found


def told_locally(metadata: Any, step: Step) -> dict[str, Any]:
    """The rows of a graph's buffers; before 0.5.20 its own view of the table was too narrow for them."""
    bs, table = step.rows, metadata.local_block_table
    used = metadata.local_seqused_k[:bs].tolist()
    # the rows lie behind each other in the buffer, however narrow the view of them
    whole = table.as_strided((bs, CHUNK // step.page_size), (table.stride(0), 1)) if step.graph else table[:bs]
    return {
        "local lengths": [metadata.local_max_query_len, metadata.local_max_seq_len],
        "local_query_start_loc": metadata.local_query_start_loc[: bs + 1].tolist(),
        "local_seqused_k": used,
        "local_block_table": [
            row[: -(-count // step.page_size)].tolist() for row, count in zip(whole, used, strict=True)
        ],
    }


def right_locally(world: World, step: Step) -> dict[str, Any]:
    """The same from the table of requests itself, whatever any SGLang computes."""
    used, blocks = [], []
    for row, length in zip(ROWS, LENGTHS, strict=True):
        start = (length - 1) // CHUNK * CHUNK
        slots = world.table[row, start : length : step.page_size].long()
        blocks.append(((world.mapping[slots] if step.has_pool else slots) // step.page_size).tolist())
        used.append(length - start)
    return {
        "local lengths": [1, max(used)],
        "local_query_start_loc": list(range(len(used) + 1)),
        "local_seqused_k": used,
        "local_block_table": blocks,
    }


def told_of_encoder(metadata: Any, step: Step) -> dict[str, Any]:
    lengths = metadata.encoder_lens_int32.tolist()
    rows = zip(metadata.encoder_page_table, lengths, strict=True)
    return {
        "encoder_lens_int32": lengths,
        "encoder_cu_seqlens_k": metadata.encoder_cu_seqlens_k.tolist(),
        "encoder_page_table": [row[:count].tolist() for row, count in rows],
        # a graph's kernels have a bound of their own
        "encoder_max_seq_len_k": None if step.graph else int(metadata.encoder_max_seq_len_k),
    }


def told(metadata: Any, page_size: int) -> dict[str, Any]:
    """Everything that a kernel of attention reads: of a table, the columns that its lengths reach."""
    found: dict[str, Any] = {name: getattr(metadata, name) for name in NUMBERS}
    for name in VECTORS:
        value = getattr(metadata, name, None)
        found[name] = None if value is None else [str(value.dtype), value.tolist()]
    lengths = metadata.cache_seqlens_int32.tolist()
    for name in TABLES:
        value = getattr(metadata, name, None)
        if value is not None:
            pages = [-(-length // page_size) for length in lengths]
            rows = [row[:count].tolist() for row, count in zip(value, pages, strict=True)]
            found[name] = [str(value.dtype), len(value), rows]
    return found
