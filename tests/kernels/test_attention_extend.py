# SPDX-License-Identifier: Apache-2.0
"""Attention inside a prefill graph: what is decided, filled and refused, without a release."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpu_sglang import flash_attention
from sglang_bcg_fixes.anatomy import ranks
from sglang_bcg_fixes.kernels import active
from sglang_bcg_fixes.kernels.attention_extend import adapter, fa3, refusals, splits, trial
from sglang_bcg_fixes.kernels.attention_extend.declaration import KERNEL
from sglang_bcg_fixes.kernels.fa_metadata.declaration import MODULE
from sglang_bcg_fixes.kernels.linear_extend import serving
from sglang_bcg_fixes.kernels.linear_extend.serving import UNKNOWN_PARTS, FallBack
from sglang_bcg_fixes.model import Accepted, Rejected

Tensor = torch.Tensor
Plain = types.SimpleNamespace
Call = Callable[..., Any]

HOST = torch.device("cpu")
H200 = 132
LLAMA, ONE_HEAD, LARGE = splits.Heads(32, 8, 128), splits.Heads(4, 1, 128), splits.Heads(4, 1, 256)
SMALL, WINDOW = splits.Heads(64, 8, 64), splits.Heads(4, 1, 128, 1023)
KINDS = (LLAMA, ONE_HEAD, LARGE, SMALL, WINDOW)


# into how many parts keys are split


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "parts"),
    [
        # four blocks of keys, and five
        (LLAMA, 8, 512, 1),
        (LLAMA, 8, 513, 5),
        (LLAMA, 8, 4096, 14),
        (ONE_HEAD, 8, 4096, 28),
        (ONE_HEAD, 16, 32768, 109),
        # as many blocks as the GPU takes at once
        (LLAMA, 128, 32768, 4),
        (LLAMA, 512, 32768, 1),
        # blocks of 80 keys
        (LARGE, 1, 320, 1),
        (LARGE, 1, 321, 5),
        # a window that is as long as the table is none: its blocks would be of 64
        (splits.Heads(4, 1, 256, 319), 1, 320, 1),
        # a window and a block of rows are all that is loaded
        (WINDOW, 8, 4096, 8),
        (WINDOW, 8, 131072, 8),
        (splits.Heads(64, 8, 64, 127), 16, 32768, 1),
    ],
)
def test_the_bound_of_a_launch(heads: splits.Heads, rows: int, keys: int, parts: int) -> None:
    assert splits.bound(heads, rows, keys, H200) == parts


@pytest.mark.parametrize(
    ("size", "blocks", "in_a_window"),
    [
        (64, (192, 128), (192, 128)),
        (96, (192, 128), (192, 128)),
        (128, (128, 128), (128, 128)),
        (192, (128, 96), (128, 96)),
        (256, (128, 80), (128, 64)),
    ],
)
def test_the_blocks_of_heads(size: int, blocks: tuple[int, int], in_a_window: tuple[int, int]) -> None:
    assert splits.tile(splits.Heads(8, 1, size), False) == blocks
    assert splits.tile(splits.Heads(8, 1, size), True) == in_a_window


def test_what_the_device_wants() -> None:
    assert splits.wanted(LLAMA, ((16, 2000),), 32768, H200) == [{8}]
    assert splits.wanted(LLAMA, ((5, 3000), (7, 900)), 32768, H200) == [{8}, {3}]
    # never none
    assert splits.wanted(LLAMA, ((1, 1),), 32768, H200) == [{1}]


def launches(number: int = 300) -> list[tuple[splits.Heads, tuple[tuple[int, int], ...], tuple[int, int]]]:
    """Batches of one to three requests at random, and the shape of their eager launch."""
    source = random.Random(0)
    found = []
    for _ in range(number):
        new = [source.choice((1, 7, 64, 300)) for _ in range(source.randint(1, 3))]
        requests = tuple((rows, rows + source.choice((0, 100, 1500, 20000))) for rows in new)
        shape = max(new), max(keys for _, keys in requests)
        found.append((source.choice(KINDS), requests, shape))
    return found


def test_launches_in_one_part_each_agree() -> None:
    table = (512, 32768)
    alone = [each for each in launches() if splits.bound(each[0], *each[2], H200) == 1]
    same_blocks = [each for each in alone if each[0].window < 0]
    assert len(same_blocks) > 20
    assert all(splits.agree(heads, requests, shape, table, 1, H200) for heads, requests, shape in same_blocks)
    # as they do where the server says so
    assert all(splits.agree(kind, requests, shape, table, 1, H200, 1) for kind, requests, shape in launches())


def test_several_requests_or_small_heads_are_never_left_to_the_host() -> None:
    table = (64, 32768)
    assert all(splits.bound(kind, *table, H200) > 1 for kind in KINDS)
    several = [each for each in launches() if len(each[1]) > 1]
    assert not any(splits.agree(heads, requests, shape, table, 0, H200) for heads, requests, shape in several)
    # even if the eager launch has the same shape
    assert not splits.agree(SMALL, ((64, 32768),), table, table, 0, H200)
    assert splits.agree(LLAMA, ((64, 32768),), table, table, 0, H200)


def test_a_split_launch_agrees_by_what_the_device_chooses() -> None:
    # bounds of 14 and 15, and 8 parts
    assert splits.agree(LLAMA, ((16, 2000),), (16, 2000), (16, 32768), 0, H200)
    assert not splits.agree(LLAMA, ((16, 2000),), (16, 2000), (16, 32768), 1, H200)
    # a bound of 5, where the device would take 8
    assert splits.bound(LLAMA, 100, 2000, H200) < 8
    assert not splits.agree(LLAMA, ((16, 2000),), (100, 2000), (16, 32768), 0, H200)


def test_a_window_that_only_the_context_is_longer_than_changes_the_blocks_of_large_heads() -> None:
    request = ((8, 100),)
    within, longer = (8, 100), (8, 32768)
    assert splits.agree(splits.Heads(4, 1, 128, 127), request, within, longer, 1, H200)
    assert not splits.agree(splits.Heads(4, 1, 256, 127), request, within, longer, 1, H200)
    assert not splits.agree(splits.Heads(4, 1, 256, 127), request, (8, 128), longer, 1, H200)
    assert splits.agree(splits.Heads(4, 1, 256, 127), request, (8, 129), longer, 1, H200)


# the tables


@dataclasses.dataclass
class Metadata:
    """Fields of SGLang's metadata."""

    cache_seqlens_int32: Any = None
    max_seq_len_q: int = 1
    max_seq_len_k: int = 0
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    page_table: Any = None
    swa_page_table: Any = None
    swa_out_cache_loc: Any = None
    encoder_page_table: Any = None


PAGES, ROWS = 6, 16


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def metadata(window: bool = False, **changed: Any) -> Metadata:
    """Two requests: 3 new tokens of 7 keys, and 2 of 2."""
    found = Metadata(integers(7, 2), 3, 7, integers(0, 3, 5), None, integers([1, 2, 3], [4, 5, 0]))
    if window:
        found.swa_page_table = integers([11, 12, 13], [14, 15, 0])
        found.swa_out_cache_loc = torch.tensor([21, 22, 23, 24, 25])
    return dataclasses.replace(found, **changed)


def poisoned(window: bool = False) -> fa3.Tables:
    tables = fa3.Tables(metadata(window), PAGES, ROWS, HOST)
    for table in (tables._sizes, tables.table, tables.window_table, tables.window_slots):
        if table is not None:
            table.fill_(0x7F7F7F7F)
    return tables


def test_an_empty_batch_is_padding_alone() -> None:
    tables = poisoned()
    tables.clear(8)
    assert tables.lengths.tolist() == [0] * 4
    assert tables.starts.tolist() == [0, 8, 8, 8, 8]


@pytest.mark.parametrize("window", [False, True])
def test_whatever_the_tables_held_they_hold_the_batch_and_its_padding(window: bool) -> None:
    tables = poisoned(window)
    tables.fill(metadata(window), 8)
    assert tables.lengths.tolist() == [7, 2, 0, 0]
    # the first slot without keys has the padding
    assert tables.starts.tolist() == [0, 3, 5, 8, 8]
    assert tables.table[:2, :3].tolist() == [[1, 2, 3], [4, 5, 0]]
    if window:
        assert tables.window_table is not None and tables.window_slots is not None
        assert tables.window_table[:2, :3].tolist() == [[11, 12, 13], [14, 15, 0]]
        assert tables.window_slots[:8].tolist() == [21, 22, 23, 24, 25] + [0] * 3
    # of another batch nothing is left
    shorter = metadata(cache_seqlens_int32=integers(4), cu_seqlens_q=integers(0, 4), page_table=integers([9]))
    shorter.swa_page_table, shorter.swa_out_cache_loc = (integers([19]), torch.tensor([31])) if window else (None, None)
    tables.fill(shorter, 16)
    assert tables.lengths.tolist() == [4, 0, 0, 0]
    assert tables.starts.tolist() == [0, 4, 16, 16, 16]
    assert tables.table[0, 0] == 9
    if window:
        assert tables.window_table is not None and tables.window_slots is not None
        assert tables.window_table[0, 0] == 19 and tables.window_slots.tolist() == [31] + [0] * 15
        # what a graph of fewer rows does not read is of no batch
        tables.window_slots.fill_(7)
        tables.fill(shorter, 8)
        assert tables.window_slots.tolist() == [31] + [0] * 7 + [7] * 8


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_the_rows_of_padding_are_of_a_slot_without_keys(requests: int) -> None:
    tables = poisoned()
    new = list(range(1, requests + 1))
    starts = [sum(new[:number]) for number in range(requests + 1)]
    batch = metadata(
        cache_seqlens_int32=integers(*new), cu_seqlens_q=integers(*starts), page_table=integers(*[[1]] * requests)
    )
    tables.fill(batch, 8)
    assert tables.starts.tolist() == [*starts, *[8] * (4 - requests)]
    assert tables.lengths.tolist() == [*new, *[0] * (4 - requests)]


def test_a_layer_is_captured_with_the_static_tables() -> None:
    tables = fa3.Tables(metadata(True), PAGES, ROWS, HOST)
    found = tables.for_rows(8)
    assert type(found) is Metadata and found.max_seq_len_q == 8
    assert tables.window_table is not None and tables.window_slots is not None
    for static, seen in (
        (tables.lengths, found.cache_seqlens_int32),
        (tables.starts, found.cu_seqlens_q),
        (tables.table, found.page_table),
        (tables.window_table, found.swa_page_table),
        (tables.window_slots[:8], found.swa_out_cache_loc),
    ):
        assert seen.data_ptr() == static.data_ptr() and seen.shape == static.shape
    plain = fa3.Tables(metadata(), PAGES, ROWS, HOST)
    assert plain.for_rows(8).swa_page_table is None and plain.for_rows(8).swa_out_cache_loc is None


def test_only_hopper_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, kind in (((9, 0), Accepted), ((10, 0), Rejected), ((8, 9), Rejected)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert type(fa3.ready(0)) is kind


# where a release keeps what it captured


def test_answers_are_copied_but_where_they_are_the_same() -> None:
    one, other, third = (torch.zeros(4) for _ in range(3))
    assert adapter.copies_between(None, None) == []
    assert adapter.copies_between(one, one) == []
    (pair,) = adapter.copies_between(one, other) or []
    assert pair[0] is other and pair[1] is one
    pairs = adapter.copies_between((one, [other, None]), (third, [other, None])) or []
    assert [(to.data_ptr(), source.data_ptr()) for to, source in pairs] == [(third.data_ptr(), one.data_ptr())]


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (torch.zeros(4), None),
        (torch.zeros(4), torch.zeros(5)),
        ((torch.zeros(4),), (torch.zeros(4), torch.zeros(4))),
        ([torch.zeros(4), object()], [torch.zeros(4), object()]),
        (object(), object()),
    ],
)
def test_unlike_answers_are_not_copied(answer: Any, place: Any) -> None:
    assert adapter.copies_between(answer, place) is None


def test_early_releases_return_what_later_ones_keep() -> None:
    place = Plain(_graphs={8: "graph"}, _outputs={8: "answer"})
    assert adapter.stored(place, 8, None) == ("graph", "answer")
    assert adapter.stored(Plain(), 8, ("graph", "answer")) == ("graph", "answer")
    place._graphs[8], place._outputs[8] = "twin", "other"
    adapter.restore(place, 8, ("graph", "answer"))
    assert (place._graphs, place._outputs) == ({8: "graph"}, {8: "answer"})
    adapter.restore(Plain(), 8, ("graph", "answer"))


# which graph is replayed


class Graph:
    """A graph, to be referred to weakly."""

    def __init__(self, *breaks: Any) -> None:
        self._break_fns = list(breaks)


def served(kinds: tuple[splits.Heads, ...], bounds: tuple[int, ...] = (1,)) -> tuple[Any, Graph, list[str]]:
    left: list[str] = []
    found: Any = object.__new__(adapter.Served)
    found.backend = Plain(page_size=1, num_splits=0, forward_metadata=None)
    found.selected = Plain(fall_back=left.append)
    found.multiprocessors, found.pages = H200, 32768
    found.tables = fa3.Tables(metadata(), found.pages, ROWS, HOST)
    found.kinds = dict.fromkeys(kinds, False)
    found.requests, found.replayed = (), None
    runner = Plain(attn_backend=found.backend, token_to_kv_pool=None)
    found.model_runner = lambda: runner
    graph = Graph()
    found.twins = weakref.WeakKeyDictionary({graph: [adapter.Twin(f"bound {each}", 16, each, []) for each in bounds]})
    return found, graph, left


def asked(new: int, keys: int) -> tuple[Any, Metadata]:
    """A batch of one request, and its metadata."""
    table = torch.zeros(1, keys, dtype=torch.int32)
    made = metadata(cache_seqlens_int32=integers(keys), cu_seqlens_q=integers(0, new), page_table=table)
    made.max_seq_len_q, made.max_seq_len_k = new, keys
    return batch(extend_seq_lens_cpu=[new], extend_prefix_lens_cpu=[keys - new], req_pool_indices=[0]), made


def batch(**changed: Any) -> Any:
    plain = {"forward_mode": Plain(name="EXTEND"), "extend_seq_lens_cpu": [3, 2], "extend_prefix_lens_cpu": [4, 0]}
    return Plain(**{**plain, "req_pool_indices": [0, 1], "input_ids": [0] * 5, **changed})


OTHERWISE = "keys that FlashAttention would split in another way"


@pytest.mark.parametrize(
    ("bounds", "keys", "chosen"),
    [
        ((1,), 500, "bound 1"),
        ((1,), 2000, None),
        ((1, 0), 2000, "bound 0"),
        ((1, 0), 500, "bound 1"),
        ((1, 0), 700, None),
    ],
)
def test_a_graph_is_replayed_that_splits_keys_as_the_breaks_do(
    bounds: tuple[int, ...], keys: int, chosen: str | None
) -> None:
    found, graph, left = served((LLAMA,), bounds)
    request, found.backend.forward_metadata = asked(16, keys)
    if keys == 700:
        # every kind of layer must agree
        found.kinds[SMALL] = False
    found.note(request)
    twin = found.chosen(graph)
    assert (twin and twin.graph) == chosen
    assert left == ([] if chosen else [OTHERWISE])
    assert found.tables.lengths.tolist() == [keys if chosen else 0, 0, 0, 0]
    # a second replay was not asked about
    assert found.chosen(graph) is None and len(left) == (chosen is None)


def test_a_request_longer_than_the_graph_keeps_the_breaks() -> None:
    found, graph, left = served((LLAMA,))
    request, found.backend.forward_metadata = asked(17, 100)
    found.note(request)
    assert found.chosen(graph) is None and left == [OTHERWISE]


def test_metadata_of_another_batch_keeps_the_breaks() -> None:
    found, graph, left = served((LLAMA,))
    request, found.backend.forward_metadata = asked(16, 100)
    found.backend.forward_metadata.max_seq_len_k = 101
    found.note(request)
    assert found.chosen(graph) is None and left == ["metadata of another batch"]
    found.backend.forward_metadata = metadata(encoder_page_table=integers(1))
    found.note(request)
    assert found.chosen(graph) is None and left[1:] == ["metadata with encoder_page_table"]


def test_metadata_is_replayed_once_and_of_the_captured_backend_alone() -> None:
    found, graph, left = served((LLAMA,))
    request, found.backend.forward_metadata = asked(16, 100)
    found.note(request)
    assert found.chosen(graph) is not None and left == []
    # as when another backend was asked to prepare the next batch
    found.note(request)
    assert found.chosen(graph) is None and left == ["metadata of a batch that was replayed already"]
    _, found.backend.forward_metadata = asked(16, 100)
    found.model_runner().attn_backend = Plain(full_attn_backend=Plain())
    found.note(request)
    assert found.chosen(graph) is None and left[1:] == ["another attention backend than the captured one"]
    found.model_runner().attn_backend = Plain(full_attn_backend=found.backend)
    found.note(request)
    assert found.chosen(graph) is not None


@pytest.mark.parametrize("part", ["", "full_kv_pool", "swa_kv_pool"])
def test_keys_that_are_loaded_layer_by_layer_keep_the_breaks(part: str) -> None:
    found, _, left = served((LLAMA,))
    pool = Plain(layer_transfer_counter=None)
    found.model_runner().token_to_kv_pool = Plain(**{part: pool}) if part else pool
    found.note(asked(16, 100)[0])
    assert found.requests and left == []
    # a cache asks to be told after the capture
    pool.layer_transfer_counter = object()
    found.note(asked(16, 100)[0])
    assert found.requests == () and left == ["keys that are loaded layer by layer"]


def test_a_batch_that_has_no_second_graph_is_no_fallback() -> None:
    found, _, left = served((LLAMA,))
    found.note(batch(input_ids=[0] * 513, req_pool_indices=list(range(9))))
    assert found.requests == () and left == []


@pytest.mark.parametrize(("different", "others"), [(None, False), ("FlashAttention has x", False), (None, True)])
def test_where_one_rank_keeps_its_breaks_all_do(
    monkeypatch: pytest.MonkeyPatch, different: str | None, others: bool
) -> None:
    found, _, left = served((LLAMA,))
    found.device, found.dtype, found.why_not = HOST, torch.float32, None
    monkeypatch.setattr(trial, "first_difference", lambda *_: different)
    told: list[bool] = []

    def any_rank(mine: bool) -> bool:
        told.append(mine)
        return mine or others

    monkeypatch.setattr(adapter, "any_rank", any_rank)
    found.try_flash_attention()
    assert told == [different is not None]
    assert left == ([different or "another rank keeps its breaks"] if different or others else [])
    assert bool(found.twins) == (not left)


def test_a_capture_that_fails_ends_the_server_only_where_the_flag_names_the_implementation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _, left = served((LLAMA,))
    monkeypatch.setattr(active, "selected", lambda op: found.selected)
    found.why_not, found.device = None, HOST
    kept = (Graph(), torch.zeros(1))
    place = Plain(_graphs={}, _outputs={})

    def fail() -> None:
        place._graphs[8], place._outputs[8] = Graph(), None
        raise MemoryError("none left")

    found.selected.required = True
    with pytest.raises(RuntimeError, match=r"not captured with attention inside .*EXTEND=off"):
        found.captured(place, 8, 8, 1, fail, kept)
    found.selected.required = False
    assert found.captured(place, 8, 8, 1, fail, kept) is None
    (why,) = left
    assert why == found.why_not == "a graph of 8 rows was not captured with attention inside (MemoryError: none left)"
    assert why in caplog.text and found.bound is None
    # SGLang's graph is where it was
    assert (place._graphs[8], place._outputs[8]) == kept


@pytest.mark.parametrize("fails", [False, True])
def test_no_second_graph_ends_before_sglangs(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would free cuBLAS's workspaces of the stream that SGLang's graphs were captured on."""
    found, _, left = served((LLAMA,))
    # a log that pytest keeps would keep the graph
    monkeypatch.setattr(adapter, "without_it", lambda *words: "it failed")
    found.why_not, found.device = None, HOST
    kept = (Graph(), torch.zeros(1))
    place = Plain(_graphs={}, _outputs={})
    second: list[weakref.ref[Graph]] = []

    def capture() -> None:
        graph = Graph(found.refuse)
        second.append(weakref.ref(graph))
        if fails:
            raise MemoryError("none left")
        place._graphs[8], place._outputs[8] = graph, torch.zeros(1)

    assert found.captured(place, 8, 8, 1, capture, kept) is None and len(left) == 1
    gc.collect()
    graph = second[0]()
    # what its breaks hold is free
    assert graph is not None and not graph._break_fns
    del graph, kept
    place._graphs.clear()
    gc.collect()
    assert second[0]() is None


def test_a_capture_that_cuda_ends_ends_the_server_and_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own captures would end it next, and sampling would; neither error names this package."""
    found, _, _ = served((LLAMA,))
    found.why_not, found.device = None, HOST

    def end(*words: Any, **named: Any) -> None:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(torch, "rand", end)
    place = Plain(_graphs={}, _outputs={})
    with pytest.raises(RuntimeError, match=r"of 8 rows was not captured .*neither capture nor draw.*EXTEND=off"):
        found.captured(place, 8, 8, 1, end, (Graph(), torch.zeros(1)))


@pytest.mark.parametrize(
    ("before", "free", "others", "lacks"),
    [
        *((8, 5, False, False), (8, 4, False, True), (2.5, 2.5, False, False), (1.9, 1.9, False, True)),
        (8, 5, True, True),
        # other servers that start on this GPU have taken most
        *((140, 66, False, False), (140, 12, False, False), (140, 10, False, True)),
    ],
)
def test_little_memory_in_one_rank_keeps_the_breaks_in_all(
    monkeypatch: pytest.MonkeyPatch, before: float, free: float, others: bool, lacks: bool
) -> None:
    found, _, left = served((LLAMA,))
    found.why_not, found.device, found.free_before, found.reserved_before = None, HOST, before * 2**30, 2**30
    monkeypatch.setattr(adapter, "reserved_memory", lambda device: 2 * 2**30)
    monkeypatch.setattr(adapter, "free_memory", lambda device: free * 2**30)
    monkeypatch.setattr(adapter, "any_rank", lambda mine: mine or others)
    captured: list[int] = []
    found.captured = lambda *words: captured.append(words[3])
    found.add_twins(Plain(), 8, lambda: None, None)
    assert captured == ([] if lacks else [1, 0])
    assert left == (["too little GPU memory, during the capture"] if lacks else [])
    assert bool(found.twins) is not lacks


def test_a_trial_that_fails_keeps_the_breaks_in_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, left = served((LLAMA,))
    found.device, found.dtype, found.why_not = HOST, torch.float32, None
    monkeypatch.setattr(trial, "first_difference", lambda *_: 1 / 0)
    told: list[bool] = []

    def any_rank(mine: bool) -> bool:
        told.append(mine)
        return mine

    monkeypatch.setattr(adapter, "any_rank", any_rank)
    found.try_flash_attention()
    assert told == [True] and not found.twins
    assert left == ["its trial ended in ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(("ranks", "required"), [(1, False), (2, True), (2, False)])
def test_several_ranks_have_second_graphs_by_name_alone(
    monkeypatch: pytest.MonkeyPatch, ranks: int, required: bool
) -> None:
    selected = Plain(required=required, module=lambda index: None)
    monkeypatch.setattr(active, "selected", lambda op: selected)
    monkeypatch.setattr(adapter, "flash_attention_of", lambda runner: Plain(max_context_len=10, page_size=4))
    monkeypatch.setattr(adapter, "why_not_server", lambda *_: None)
    monkeypatch.setattr(adapter, "tensor_parallel_ranks", lambda: ranks)
    monkeypatch.setattr(adapter, "multiprocessors", lambda device: H200)
    model_runner: Any = Graph()
    model_runner.device, model_runner.dtype = "cpu", torch.float32
    runner = Plain(model_runner=model_runner)
    if ranks > 1 and not required:
        with pytest.raises(FallBack, match="several ranks, unless the flag names an implementation"):
            adapter.Served(runner)
    else:
        assert adapter.Served(runner).table_keys == 12


@pytest.mark.parametrize("required", [False, True])
def test_a_server_that_cannot_be_read_keeps_its_breaks_unless_the_flag_names_the_implementation(
    monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    left: list[str] = []
    monkeypatch.setattr(active, "selected", lambda op: Plain(required=required, fall_back=left.append))
    monkeypatch.setattr(adapter, "makes_breakable_graphs", lambda runner: True)
    if required:
        with pytest.raises(RuntimeError, match=rf"cannot read \(AttributeError: .*\. Set {KERNEL.flag}=off"):
            adapter.Operation().begin(Plain())
    else:
        assert adapter.Operation().begin(Plain()) is None
    assert len(left) == (not required) and all("AttributeError" in why for why in left)


def test_what_the_self_check_has_dropped_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(active, "selected", lambda op: Plain(required=False, fall_back=left.append))
    monkeypatch.setattr(adapter, "makes_breakable_graphs", lambda runner: True)
    operation, runner, first = adapter.Operation(), Graph(), served((LLAMA,))[0]
    first.why_not, operation.of_runner[runner] = None, first
    operation.drop("it answered otherwise")
    assert not operation.of_runner and first.why_not == "it answered otherwise"
    # as after a reload of weights
    monkeypatch.setattr(adapter, "Served", lambda runner: pytest.fail("it is captured again"))
    assert operation.begin(runner) is None and left == ["it answered otherwise"]


def test_a_graph_without_another_is_no_fallback() -> None:
    found, _, left = served((LLAMA,))
    found.note(asked(16, 100)[0])
    assert found.chosen(Graph()) is None and left == []


@pytest.mark.parametrize("number", [3, 4])
def test_more_requests_than_slots_keep_the_breaks(number: int) -> None:
    found, _, left = served((LLAMA,))
    found.requests = ((9, 9),)
    many = batch(
        extend_seq_lens_cpu=[2] * number, extend_prefix_lens_cpu=[5] * number, req_pool_indices=list(range(number))
    )
    found.note(many)
    assert found.requests == (((2, 7),) * 3 if number == 3 else ())
    assert left == ([] if number == 3 else ["more than 3 requests in a batch"])


# what is refused


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"forward_mode": Plain(name="MIXED")}, None),
        ({"forward_mode": Plain(name="TARGET_VERIFY")}, "a batch of mode TARGET_VERIFY"),
        *(({name: [1]}, f"a batch with {name}") for name in (*UNKNOWN_PARTS, "encoder_lens")),
        ({"mha_return_lse": True}, "a batch whose attention returns sums"),
        ({"extend_seq_lens_cpu": None}, "lengths that the host does not know"),
        ({"extend_prefix_lens_cpu": None}, "lengths that the host does not know"),
    ],
)
def test_batches_that_are_refused(changed: dict[str, Any], reason: str | None) -> None:
    assert refusals.unknown_part_of(batch(**changed)) == reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"cu_seqlens_k": integers(0, 7)}, None),
        ({"encoder_page_table": integers(0)}, "metadata with encoder_page_table"),
        ({"encoder_page_table": 3}, "metadata with encoder_page_table"),
    ],
)
def test_metadata_that_is_refused(changed: dict[str, Any], reason: str | None) -> None:
    assert refusals.unknown_part_of_metadata(metadata(True, **changed)) == reason


@pytest.mark.parametrize(
    ("requests", "same"),
    [
        (((3, 7), (2, 2)), True),
        (((2, 2), (3, 7)), True),
        (((3, 7),), False),
        (((4, 7), (2, 2)), False),
        (((3, 8), (2, 2)), False),
    ],
)
def test_metadata_is_told_from_that_of_another_batch(requests: tuple[tuple[int, int], ...], same: bool) -> None:
    assert refusals.is_of(metadata(), requests) is same


def layer(**changed: Any) -> Any:
    plain = {"is_cross_attention": False, "attn_type": Plain(value="decoder"), "use_irope": False}
    sizes = {"logit_cap": 0.0, "qk_head_dim": 128, "v_head_dim": 128, "tp_q_head_num": 8, "tp_k_head_num": 2}
    return Plain(**{**plain, **sizes, **changed})


@pytest.mark.parametrize(
    ("changed", "given", "reason"),
    [
        ({}, {}, None),
        ({"attn_type": "decoder"}, {"sinks": 1, "save_kv_cache": False, "key_value_num_tokens": 3}, None),
        ({}, {"k_rope": None}, None),
        ({}, {"q_rope": 1, "k_rope": 1}, "a layer that is given k_rope, q_rope"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": Plain(value="encoder_only")}, {}, "encoder_only attention"),
        ({"use_irope": True}, {}, "chunked local attention"),
        ({"v_head_dim": 64}, {}, "keys of 128 and values of 64"),
        ({"tp_k_head_num": 3}, {}, "8 heads for 3 of keys"),
    ],
)
def test_layers_that_are_refused(changed: dict[str, Any], given: dict[str, Any], reason: str | None) -> None:
    assert refusals.why_not_layer(layer(**changed), given, is_named=False) == reason


def test_heads_that_no_server_was_measured_with_are_taken_by_name() -> None:
    for changed, what in (
        ({"qk_head_dim": 64, "v_head_dim": 64}, "heads of 64"),
        ({"logit_cap": 30.0}, "a cap of logits"),
    ):
        unmeasured = layer(**changed)
        assert (
            refusals.why_not_layer(unmeasured, {}, is_named=False) == f"{what}, unless the flag names an implementation"
        )
        assert refusals.why_not_layer(unmeasured, {}, is_named=True) is None


BACKEND = {
    **{"fa_impl_ver": 3, "use_mla": False, "is_encoder_decoder": False, "kv_cache_dtype": torch.bfloat16},
    **{"max_context_len": 32768},
}
SERVER = {"is_draft_worker": False, "is_generation": True}


@pytest.mark.parametrize(
    ("backend", "server", "options", "reason"),
    [
        ({}, {}, {}, None),
        ({"fa_impl_ver": 4}, {}, {}, "FlashAttention-4"),
        ({"use_mla": True}, {}, {}, "latent attention"),
        ({"is_encoder_decoder": True}, {}, {}, "an encoder"),
        ({}, {"is_draft_worker": True}, {}, "a draft model"),
        ({}, {"is_generation": False}, {}, "a model that generates nothing"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, {}, {}, "a cache in torch.float8_e4m3fn"),
        ({"kv_cache_dtype": torch.float32}, {}, {}, "a cache in torch.float32"),
        ({"fa_skip_kv_cache": True}, {}, {}, "attention without a cache"),
        ({"max_context_len": 4 << 20}, {}, {}, None),
        ({"max_context_len": (4 << 20) + 1}, {}, {}, "a context of 4194305 tokens"),
        ({}, {"attn_dp_size": 2}, {}, "DP attention"),
        ({}, {}, {"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({}, {}, {"counts": True}, "batches with counts of every rank's tokens"),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_servers_that_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    backend: dict[str, Any],
    server: dict[str, Any],
    options: dict[str, Any],
    reason: str | None,
    device: str,
) -> None:
    monkeypatch.setattr(ranks, "runtime_context", lambda: None)
    monkeypatch.setattr(serving, "is_deterministic", lambda: False)
    monkeypatch.setattr(refusals, "is_interpreted", lambda: False)
    monkeypatch.setattr(serving, "counts_ranks", lambda arguments: getattr(arguments, "counts", False))
    runner = Plain(**{**SERVER, **server}, server_args=Plain(**options))
    expected = "tensors on cpu" if device == "cpu" else reason
    if expected is None:
        refusals.why_not_server(runner, Plain(**{**BACKEND, **backend}), torch.device(device))
        return
    with pytest.raises(FallBack) as refused:
        refusals.why_not_server(runner, Plain(**{**BACKEND, **backend}), torch.device(device))
    assert str(refused.value) == expected


def test_a_deterministic_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Plain(attn_cp_size=2)
    monkeypatch.setattr(ranks, "runtime_context", lambda: Plain(get_parallel=lambda: sizes))
    monkeypatch.setattr(serving, "counts_ranks", lambda arguments: False)
    runner = Plain(**SERVER, server_args=Plain())
    for deterministic, reason in ((True, "deterministic inference"), (False, "context parallelism")):
        monkeypatch.setattr(serving, "is_deterministic", lambda found=deterministic: found)
        with pytest.raises(FallBack, match=reason):
            refusals.why_not_server(runner, Plain(**BACKEND), torch.device("cuda"))


# the installed FlashAttention, tried


def as_it_is(**given: Any) -> Any:
    return flash_attention.flash_attn_with_kvcache(**given)


def with_padding_left(**given: Any) -> Any:
    """As a FlashAttention that skips requests without keys."""
    found = as_it_is(**given)
    with_keys = int((given["cache_seqlens"] > 0).sum())
    found[int(given["cu_seqlens_q"][with_keys]) :] = 7.0
    return found


def with_padding_left_as_nan(**given: Any) -> Any:
    found = as_it_is(**given)
    with_keys = int((given["cache_seqlens"] > 0).sum())
    found[int(given["cu_seqlens_q"][with_keys]) :] = float("nan")
    return found


def rounding_by_slots(**given: Any) -> Any:
    """As one that adds in another order in a larger batch."""
    found = as_it_is(**given)
    return found * (1 + 2**-7) if len(given["cache_seqlens"]) > fa3.REQUESTS else found


def rounding_by_rows(**given: Any) -> Any:
    found = as_it_is(**given)
    return found * (1 + 2**-7) if given["max_seqlen_q"] == 8 else found


def splitting_what_is_bounded(**given: Any) -> Any:
    found = as_it_is(**given)
    return found * (1 + 2**-7) if given["num_splits"] == 1 else found


def tried(monkeypatch: pytest.MonkeyPatch, attend: Call, kinds: dict[splits.Heads, bool], bound: int = 0) -> str | None:
    monkeypatch.setitem(sys.modules, MODULE, Plain(flash_attn_with_kvcache=attend))
    backend = Plain(page_size=16, num_splits=bound)
    return trial.first_difference(kinds, backend, 256, HOST, torch.bfloat16)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_flash_attention_that_is_as_expected_is_taken(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    kinds = {LLAMA: False, splits.Heads(4, 2, 64, 127): True, splits.Heads(4, 1, 256): False}
    assert tried(monkeypatch, as_it_is, kinds, bound) is None


PADDING = "rows of padding that are no zeros behind 5 tokens behind 0 in a graph of 8 rows"


@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (with_padding_left, PADDING),
        (with_padding_left_as_nan, PADDING),
        (rounding_by_slots, "other values for 5 tokens behind 0 in a graph of 8 rows, by up to 0."),
        (rounding_by_rows, "other values for 5 tokens behind 0 in a graph of 8 rows, by up to 0."),
        (splitting_what_is_bounded, "other values for 5 tokens behind 0 in a graph of 8 rows, by up to 0."),
    ],
)
def test_another_one_is_described(monkeypatch: pytest.MonkeyPatch, attend: Call, said: str) -> None:
    found = tried(monkeypatch, attend, {LLAMA: False})
    assert found and found.startswith("FlashAttention has ") and said in found, found


def test_the_last_kind_of_layer_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_sinks(**given: Any) -> Any:
        return (with_padding_left if "sinks" in given else as_it_is)(**given)

    assert tried(monkeypatch, without_sinks, {LLAMA: False, splits.Heads(4, 2, 64): False}) is None
    assert tried(monkeypatch, without_sinks, {LLAMA: False, splits.Heads(4, 2, 64): True}) is not None


def test_every_kind_of_batch_is_tried_and_one_whose_keys_are_split() -> None:
    found = list(trial.cases(LLAMA, 1, 32768, H200, 0))
    assert {requests for requests, _, _ in found} >= set(trial.TRIED[:4])
    split = [(requests, bound) for requests, rows, bound in found if splits.bound(LLAMA, rows, 32768, H200) > 1]
    assert any(bound == 0 and requests[0][1] > 1000 for requests, bound in split)


@pytest.mark.parametrize("context", [64, 4096, 32768])
@pytest.mark.parametrize("bound", [0, 1])
def test_only_what_is_split_alike_is_tried(context: int, bound: int) -> None:
    for heads in KINDS:
        found = list(trial.cases(heads, 1, context, H200, bound))
        assert (((5, 5),), 8, 1) in found and (((32, 32),), 32, 1) in found
        for requests, rows, captured in found:
            shape = (max(new for new, _ in requests), max(keys for _, keys in requests))
            assert sum(new for new, _ in requests) <= rows and shape[1] <= context
            assert splits.agree(heads, requests, shape, (rows, context), captured, H200, bound)
    # where the server bounds every launch all are tried
    that_fit = {requests for requests in trial.TRIED if max(keys for _, keys in requests) <= context}
    assert bound == 0 or {requests for requests, _, _ in found} == that_fit
