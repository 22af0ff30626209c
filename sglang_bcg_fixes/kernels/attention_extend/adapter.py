# SPDX-License-Identifier: Apache-2.0
"""Capture a second graph for each small bucket, with attention inside, and replay it where it has the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_bcg_fixes.anatomy.ranks import any_rank, tensor_parallel_ranks
from sglang_bcg_fixes.anatomy.runners import makes_breakable_graphs
from sglang_bcg_fixes.engine import graph_break
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.attention_extend import splits, trial
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.attention_extend.fa3 import REQUESTS, Tables, multiprocessors
from sglang_bcg_fixes.kernels.attention_extend.refusals import (
    flash_attention_of,
    is_of,
    loads_layer_by_layer,
    unknown_part_of,
    unknown_part_of_metadata,
    why_not_layer,
    why_not_server,
)
from sglang_bcg_fixes.kernels.linear_extend.serving import (
    FallBack,
    Original,
    is_for_graph,
    unless_refused,
    without_it,
)

Tensor = torch.Tensor

logger = logging.getLogger("sglang_bcg_fixes")

# with more the GPU takes longer than the host
MOST_ROWS = 512
# bytes, beside as much again as SGLang's graphs took so far: others are captured later, and prefills run eagerly
LEAST_FREE = 2 << 30
# bytes that CUDA may hold of such graphs outside torch's memory: what is missing beyond, another process took
MOST_OUTSIDE = 8 << 30


@dataclasses.dataclass(eq=False)
class Twin:
    """A graph with attention inside, and what must be copied to where SGLang's graph leaves its answer."""

    graph: Any
    rows: int
    bound: int
    copies: list[tuple[Tensor, Tensor]]


class Served:
    """The second graphs of one runner."""

    def __init__(self, runner: Any) -> None:
        model_runner = runner.model_runner
        self.backend = flash_attention_of(model_runner)
        device = torch.empty(0, device=model_runner.device).device
        self.selected = active.selected(KERNEL.op)
        why_not_server(model_runner, self.backend, device)
        self.selected.module(device.index)
        # a rank whose capture fails would keep the others waiting: with the flag it ends the server instead
        if tensor_parallel_ranks() > 1 and not self.selected.required:
            raise FallBack("several ranks, unless the flag names an implementation")
        self.free_before, self.reserved_before = free_memory(device), reserved_memory(device)
        self.model_runner = weakref.ref(model_runner)
        self.device, self.multiprocessors, self.dtype = device, multiprocessors(device), model_runner.dtype
        self.pages = -(-self.backend.max_context_len // self.backend.page_size)
        self.tables: Tables | None = None
        # of layers: with sinks, or without
        self.kinds: dict[splits.Heads, bool] = {}
        self.twins: weakref.WeakKeyDictionary[Any, list[Twin]] = weakref.WeakKeyDictionary()
        # set once a layer keeps its break: no bucket has a second graph then
        self.why_not: str | None = None
        # the bound of the twin that is being captured
        self.bound: int | None = None
        self.rows = 0
        # of the batch that SGLang asked about last: new tokens and keys of each request
        self.requests: tuple[tuple[int, int], ...] = ()
        # what was replayed last: nothing is replayed twice
        self.replayed: weakref.ref[Any] | None = None

    @property
    def table_keys(self) -> int:
        return int(self.pages * self.backend.page_size)

    # capture

    def add_twins(self, place: Any, size: Any, capture: Callable[[], Any], kept: Any) -> None:
        """Capture once more, with attention inside; `kept` is what the first capture returned."""
        rows = int(getattr(size, "size", size))
        if rows > MOST_ROWS:
            return
        found: list[Twin] = []
        for bound in (1, 0):
            # an unbounded launch is another one only where its shape lets the host split
            if self.why_not or (bound == 0 and (self.backend.num_splits == 1 or not self.may_split(rows))):
                break
            if any_rank(self.lacks_memory()):
                self.refuse("too little GPU memory, during the capture")
                break
            twin = self.captured(place, size, rows, bound, capture, kept)
            if twin is not None:
                found.append(twin)
        if self.why_not:
            self.twins.clear()
        elif found:
            self.twins[stored(place, size, kept)[0]] = found

    def lacks_memory(self) -> bool:
        free = free_memory(self.device)
        reserved = max(0, reserved_memory(self.device) - self.reserved_before)
        return free < LEAST_FREE + min(max(0.0, self.free_before - free), reserved + MOST_OUTSIDE)

    def may_split(self, rows: int) -> bool:
        return any(splits.bound(kind, rows, self.table_keys, self.multiprocessors) > 1 for kind in self.kinds)

    def captured(
        self, place: Any, size: Any, rows: int, bound: int, capture: Callable[[], Any], kept: Any
    ) -> Twin | None:
        first = stored(place, size, kept)
        try:
            if self.tables is None:
                self.tables = Tables(self.backend.forward_metadata, self.pages, MOST_ROWS, self.device)
            self.tables.clear(rows)
            self.bound, self.rows = bound, rows
            graph, output = stored(place, size, capture())
        except Exception as error:
            OPERATION.keep(first[0], graphs_in(error, type(first[0])))
            what = f"a graph of {rows} rows was not captured with attention inside"
            if is_damaged(self.device):
                raise RuntimeError(
                    f"bcg-fixes {KERNEL.op}: {what}, and torch can neither capture nor draw numbers after CUDA's "
                    f"error: {error}. Set {KERNEL.flag}=off to serve without it"
                ) from error
            self.refuse(without_it(KERNEL.op, what, error))
            return None
        finally:
            self.bound = None
            restore(place, size, first)
        if graph._break_fns:
            self.refuse(f"{len(graph._break_fns)} layers that keep their break")
        OPERATION.keep(first[0], [graph])
        copies = copies_between(output, first[1])
        if copies is None:
            self.refuse(f"an answer that is a {type(output).__name__}")
        return None if self.why_not else Twin(graph, rows, bound, copies or [])

    def refuse(self, reason: str) -> None:
        if self.why_not is None:
            self.why_not = reason
            self.selected.fall_back(reason)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let SGLang's break run in the capture: no capture that it could end, and static metadata."""
        assert self.tables is not None and self.bound is not None
        backend, breaks = self.backend, graph_break.load("breakable_cuda_graph")
        before = backend.forward_metadata, backend.num_splits
        backend.forward_metadata, backend.num_splits = self.tables.for_rows(self.rows), self.bound
        capture = breaks._current_capture_var.set(None)
        try:
            yield
        finally:
            breaks._current_capture_var.reset(capture)
            backend.forward_metadata, backend.num_splits = before

    def attend(self, layer: Any, named: dict[str, Any], call: Callable[[], Any]) -> Any:
        reason = self.why_not or why_not_layer(layer, named, self.selected.required)
        if reason:
            self.refuse(reason)
            return call()
        window = -1 if layer.sliding_window_size is None else int(layer.sliding_window_size)
        heads = splits.Heads(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, window)
        self.kinds[heads] = named.get("sinks") is not None
        with self.inside():
            return call()

    def try_flash_attention(self) -> None:
        """Drop all twins, in every rank, where the installed FlashAttention of one does not what they rely on."""
        different = None
        try:
            if self.twins:
                different = trial.first_difference(self.kinds, self.backend, self.pages, self.device, self.dtype)
        except Exception as error:
            logger.debug("bcg-fixes: %s: the trial has failed", KERNEL.op, exc_info=True)
            different = f"its trial ended in {type(error).__name__}: {error}"
        if different:
            logger.warning("bcg-fixes: %s: attention keeps its break: %s", KERNEL.op, different)
        if any_rank(not self.twins or different is not None):
            self.refuse(different or "another rank keeps its breaks")
            self.twins.clear()

    # replay

    def note(self, batch: Any) -> None:
        """Note the lengths of a batch that SGLang is about to replay; none where its breaks are to stay."""
        self.requests = ()
        if len(batch.input_ids) > MOST_ROWS:
            return
        pool = getattr(self.model_runner(), "token_to_kv_pool", None)
        reason = unknown_part_of(batch) or loads_layer_by_layer(pool)
        if reason is None and len(batch.req_pool_indices) > REQUESTS:
            reason = f"more than {REQUESTS} requests in a batch"
        if reason:
            self.selected.fall_back(reason)
            return
        new, prefixes = ([int(each) for each in of] for of in (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu))
        self.requests = tuple((each, each + prefix) for each, prefix in zip(new, prefixes, strict=True))

    def chosen(self, graph: Any) -> Twin | None:
        """Return the twin that has the bits of this graph for the metadata that its breaks would read, or None."""
        twins, requests, self.requests = self.twins.get(graph), self.requests, ()
        if not twins or not requests:
            return None
        metadata = self.backend.forward_metadata
        reason = self.why_not_replay(metadata, requests)
        twin = None if reason else next((each for each in twins if self.splits_alike(each, metadata, requests)), None)
        if twin is None:
            self.selected.fall_back(reason or "keys that FlashAttention would split in another way")
            return None
        assert self.tables is not None
        self.tables.fill(metadata, twin.rows)
        self.replayed = weakref.ref(metadata)
        return twin

    def why_not_replay(self, metadata: Any, requests: tuple[tuple[int, int], ...]) -> str | None:
        """Return the reason this metadata is not what the breaks would read for these requests."""
        backend = getattr(self.model_runner(), "attn_backend", None)
        if getattr(backend, "full_attn_backend", backend) is not self.backend:
            return "another attention backend than the captured one"
        if self.replayed is not None and self.replayed() is metadata:
            return "metadata of a batch that was replayed already"
        unknown = unknown_part_of_metadata(metadata)
        if unknown is None and not (is_of(metadata, requests) and metadata.page_table.shape[1] <= self.pages):
            return "metadata of another batch"
        return unknown

    def splits_alike(self, twin: Twin, metadata: Any, requests: tuple[tuple[int, int], ...]) -> bool:
        eager = (int(metadata.max_seq_len_q), int(metadata.page_table.shape[1] * self.backend.page_size))
        captured = (twin.rows, self.table_keys)
        return eager[0] <= captured[0] and all(
            splits.agree(kind, requests, eager, captured, twin.bound, self.multiprocessors, self.backend.num_splits)
            for kind in self.kinds
        )


def graphs_in(error: Exception, kind: type) -> list[Any]:
    """List the graphs whose capture ended in this error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [each for frame in frames for each in frame.f_locals.values() if isinstance(each, kind)]


def is_damaged(device: torch.device) -> bool:
    """Tell whether CUDA has ended a capture: torch leaves its generator and the graphs' pool as if it went on."""
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        return True
    return False


class Operation:
    """The runners that have second graphs, and the one that is capturing."""

    def __init__(self) -> None:
        self.capturing: Served | None = None
        # whether the last replay was of a second graph
        self.took_twin = False
        self._is_withheld = False
        # why they were dropped: graphs that are captured again, after a reload, would be no better
        self.dropped: str | None = None
        self.of_runner: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
        self.of_graph: weakref.WeakKeyDictionary[Any, Served] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def keep(self, beside: Any, graphs: list[Any]) -> None:
        """Keep second graphs as long as SGLang's, also those that are never replayed.

        With torch 2.13 the end of a graph frees cuBLAS's workspaces of its stream. SGLang's graphs of that stream
        would go on writing there.
        """
        for graph in graphs:
            if graph is not beside:
                self._kept.setdefault(beside, []).append(graph)
                # a second graph with breaks is never replayed: what they hold is freed
                graph._break_fns.clear()

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Replay SGLang's own graphs meanwhile."""
        self._is_withheld = True
        try:
            yield
        finally:
            self._is_withheld = False

    def chosen(self, graph: Any) -> Twin | None:
        served = None if self._is_withheld else self.of_graph.get(graph)
        twin = served.chosen(graph) if served is not None else None
        self.took_twin = twin is not None
        return twin

    def drop(self, reason: str) -> None:
        """Replay SGLang's own graphs from now on."""
        self.dropped = reason
        for served in self.of_runner.values():
            served.refuse(reason)
        self.of_runner.clear()
        self.of_graph.clear()
        logger.warning("bcg-fixes: %s: prefill is replayed from SGLang's own graphs: %s", KERNEL.op, reason)

    def begin(self, runner: Any) -> Served | None:
        if not makes_breakable_graphs(runner):
            return None
        if self.dropped is not None:
            active.selected(KERNEL.op).fall_back(self.dropped)
            return None
        return unless_refused(KERNEL.op, lambda: Served(runner))


OPERATION = Operation()


# the bodies of the patch points


def capture(original: Original, self: Any) -> None:
    OPERATION.of_runner.pop(self, None)
    OPERATION.capturing = served = OPERATION.begin(self)
    try:
        original(self)
    finally:
        OPERATION.capturing = None
    if served is not None:
        served.try_flash_attention()
    if served is not None and served.twins:
        OPERATION.of_runner[self] = served
        for graph in served.twins:
            OPERATION.of_graph[graph] = served


def capture_one(original: Original, self: Any, *positional: Any, **named: Any) -> Any:
    kept = original(self, *positional, **named)
    served = OPERATION.capturing
    if served is not None:
        size = positional[0] if positional else next(iter(named.values()))
        served.add_twins(self, size, lambda: original(self, *positional, **named), kept)
    return kept


def forward(original: Original, self: Any, q: Any, k: Any, v: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    served = OPERATION.capturing
    if served is None or served.bound is None or not is_for_graph(forward_batch):
        return original(self, q, k, v, forward_batch, *rest, **named)
    return served.attend(self, named, functools.partial(original, self, q, k, v, forward_batch, *rest, **named))


def can_replay(original: Original, self: Any, forward_batch: Any) -> bool:
    answer: bool = original(self, forward_batch)
    served = OPERATION.of_runner.get(self)
    if answer and served is not None:
        served.note(forward_batch)
    return answer


def replay(original: Original, self: Any) -> None:
    twin = OPERATION.chosen(self)
    if twin is None:
        original(self)
        return
    original(twin.graph)
    for to, answer in twin.copies:
        to.copy_(answer)


def free_memory(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


def reserved_memory(device: torch.device) -> int:
    """Return the bytes that torch has in this process, of which the memory of graphs is a part."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


# where a release keeps the graph and the answer of a size


def stored(place: Any, size: Any, kept: Any) -> tuple[Any, Any]:
    """Return the graph and the answer: early releases return them, later ones keep them by size."""
    return kept if kept is not None else (place._graphs[size], place._outputs[size])


def restore(place: Any, size: Any, first: tuple[Any, Any]) -> None:
    if hasattr(place, "_graphs"):
        place._graphs[size], place._outputs[size] = first


def copies_between(answer: Any, place: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Pair the tensors of an answer with those of another, but for those that are the same; None if they differ."""
    if answer is None and place is None:
        return []
    if isinstance(answer, Tensor) and isinstance(place, Tensor) and answer.shape == place.shape:
        return [] if answer.data_ptr() == place.data_ptr() else [(place, answer)]
    if isinstance(answer, tuple | list) and isinstance(place, tuple | list) and len(answer) == len(place):
        each = [copies_between(one, other) for one, other in zip(answer, place, strict=True)]
        return None if None in each else [pair for pairs in each if pairs for pair in pairs]
    return None
