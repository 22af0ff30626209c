"""Local attention on pages of sixteen tokens: the real FlashAttentionBackend, against what it must amount to."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy
import pytest
import torch

from sglang_bcg_fixes.fixes import local_attention_pages as fix
from tests import processes

EAGER_IS_WRONG = ("0.5.11",)
ONLY_REPLAY_IS_WRONG = ("0.5.21",)

CODE = """
import json, types
from cpu_sglang import one_batch
one_batch.import_sglang()
one_batch.load_plugins()
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang_bcg_fixes.plugin import load

PAGE, CHUNK = 16, 64
loaded = one_batch.load("llama", attention_backend="fa3", page_size=PAGE)
runner = loaded.model_runner
one_batch.randomize(runner.model)
backend = runner.attn_backend
for layer in runner.model.modules():
    if isinstance(layer, RadixAttention):
        layer.use_irope = True

# all within one chunk: local attention is then nothing but attention
PROMPTS = [list(range(3, 3 + length)) for length in (37, 20)]
whole = one_batch.generate(loaded, PROMPTS, 3)[1]
backend.has_local_attention, backend.attention_chunk_size, backend.max_context_len = True, CHUNK, 256

# two pools whose pages are in another order; requests of three chunks, of less than one, of half a page, a padded row
TOKENS = 512
order = torch.randperm(TOKENS // PAGE, generator=torch.Generator().manual_seed(0))
mapping = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
pages = torch.arange(TOKENS // PAGE).flip(0).view(2, -1)
LONG, SHORT = [150, 7, 1], [37, 7, 1]
table = torch.cat([pages, torch.zeros(1, TOKENS // PAGE // 2, dtype=torch.long)]).int()

def replayed(lengths, own_pool):
    backend.use_sliding_window_kv_pool = own_pool
    ordinary = runner.token_to_kv_pool
    backend.token_to_kv_pool = types.SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: mapping[slots.long()])
    buffers = {"local_query_start_loc": 20, "local_seqused_k": 20, "local_block_table": (20, CHUNK // PAGE)}
    buffers = {name: torch.full(shape if isinstance(shape, tuple) else (shape,), 99, dtype=torch.int32)
        for name, shape in buffers.items()}
    backend.decode_cuda_graph_local_attn_metadata = buffers
    backend.decode_cuda_graph_metadata = {"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}
    captured = types.SimpleNamespace(local_max_query_len=0, local_max_seq_len=0)
    metadata = types.SimpleNamespace(page_table=table, cache_seqlens_int32=torch.tensor(lengths, dtype=torch.int32),
        local_attn_metadata=captured)
    backend._maybe_update_local_attn_metadata_for_replay(metadata, 3)
    backend.use_sliding_window_kv_pool, backend.token_to_kv_pool = False, ordinary
    read = []
    for row, length in enumerate(buffers["local_seqused_k"].tolist()[:3]):
        row_of_pages = buffers["local_block_table"][row, : -(-length // PAGE)]
        read.append((row_of_pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length].tolist())
    rest = [buffers["local_query_start_loc"][4:], buffers["local_seqused_k"][3:], buffers["local_block_table"][3:]]
    return {"slots": read, "starts": buffers["local_query_start_loc"][:4].tolist(), "largest": vars(captured),
        "rest is zero": not any(bool(part.any()) for part in rest)}

def expected(lengths, own_pool):
    found = []
    for row, length in enumerate(lengths):
        positions = torch.arange((length - 1) // CHUNK * CHUNK, length)
        slots = table[row, positions // PAGE].long() * PAGE + positions % PAGE
        found.append((mapping[slots] if own_pool else slots).tolist())
    return {"slots": found, "starts": [0, 1, 2, 3], "rest is zero": True,
        "largest": {"local_max_query_len": 1, "local_max_seq_len": max(map(len, found))}}

def eager():
    try:
        return bool(torch.allclose(one_batch.generate(loaded, PROMPTS, 3)[1], whole, atol=1e-2))
    except IndexError as error:
        return str(error).partition(" for ")[0]

def is_right(*case):
    return replayed(*case) == expected(*case)

def look():
    return {"eager": eager(), "long": is_right(LONG, False), "short": is_right(SHORT, False),
        "own pool": is_right(LONG, True)}

process = load()
applied = process.ledger.applied()
found = {"applied": applied, "with": look()}
for name in applied:
    process.ledger.undo(name)
print("RESULT", json.dumps({**found, "without": look()}))
"""


@pytest.mark.parametrize("release", (*EAGER_IS_WRONG, *ONLY_REPLAY_IS_WRONG))
def test_local_layers_see_their_chunk(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    only = {"SGLANG_BCG_FIXES": "off", "SGLANG_BCG_FIX_LOCAL_ATTENTION_PAGES": "on"}
    found = processes.beside(release_root(release), "-c", CODE, **only)[0]
    assert found["applied"] == ["local_attention_pages"]
    assert found["with"] == {"eager": True, "long": True, "short": True, "own pool": True}
    right = release in ONLY_REPLAY_IS_WRONG
    # a slot taken for a page lies behind the cache
    eager = True if right else "index 64 is out of bounds"
    assert found["without"] == {"eager": eager, "long": True, "short": right, "own pool": False}


def test_chunks_are_those_of_a_loop_over_every_token() -> None:
    generator = numpy.random.default_rng(0)
    for _ in range(300):
        page = int(generator.choice([2, 4, 16]))
        chunk = page * int(generator.integers(1, 5))
        lengths = generator.integers(1, 6 * chunk, size=generator.integers(1, 6))
        queries = numpy.array([generator.integers(1, length + 1) for length in lengths])
        table = torch.arange(len(lengths) * (-(-int(lengths.max()) // page))).view(len(lengths), -1)
        found = fix.chunks_of(chunk, page, numpy.concatenate([[0], numpy.cumsum(queries)]), lengths, table)
        expected: dict[tuple[int, int], list[int]] = {}
        for row, (length, new) in enumerate(zip(lengths, queries, strict=True)):
            for position in range(length - new, length):
                expected.setdefault((row, position // chunk), []).append(position)
        assert found.queries.tolist() == [len(new) for new in expected.values()]
        for (row, number), keys, pages in zip(expected, found.keys, found.pages, strict=True):
            seen = range(number * chunk, min((number + 1) * chunk, lengths[row]))
            assert keys == len(seen)
            assert pages[: -(-keys // page)].tolist() == table[row, seen[0] // page : seen[-1] // page + 1].tolist()
