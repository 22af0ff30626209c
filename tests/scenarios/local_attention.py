# SPDX-License-Identifier: Apache-2.0
"""Local attention on pages of sixteen tokens: what replays of the real FlashAttentionBackend read."""

from __future__ import annotations

import types
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import telling

PAGE, CHUNK, TOKENS = 16, 64, 512
# all within one chunk: local attention is then nothing but attention
PROMPTS = [list(range(3, 3 + length)) for length in (37, 20)]
# requests of three chunks, of less than one, of half a page, a padded row
LONG, SHORT = [150, 7, 1], [37, 7, 1]
# two pools whose pages are in another order
ORDER = torch.randperm(TOKENS // PAGE, generator=torch.Generator().manual_seed(0))
MAPPING = (ORDER[:, None] * PAGE + torch.arange(PAGE)).flatten()
PAGES = torch.arange(TOKENS // PAGE).flip(0).view(2, -1)
TABLE = torch.cat([PAGES, torch.zeros(1, TOKENS // PAGE // 2, dtype=torch.long)]).int()


class LocalAttention:
    """A small Llama all of whose layers attend locally."""

    def __init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        self.loaded = one_batch.load("llama", attention_backend="fa3", page_size=PAGE)
        self.runner = self.loaded.model_runner
        one_batch.randomize(self.runner.model)
        self.backend = self.runner.attn_backend
        for layer in self.runner.model.modules():
            if isinstance(layer, RadixAttention):
                layer.use_irope = True
        self.whole = one_batch.generate(self.loaded, PROMPTS, 3)[1]
        self.backend.has_local_attention = True
        self.backend.attention_chunk_size, self.backend.max_context_len = CHUNK, 256

    def look(self) -> dict[str, Any]:
        return {
            "eager": self.eager(),
            "long": self.is_right(LONG, False),
            "short": self.is_right(SHORT, False),
            "own pool": self.is_right(LONG, True),
        }

    def eager(self) -> bool | str:
        try:
            return bool(torch.allclose(one_batch.generate(self.loaded, PROMPTS, 3)[1], self.whole, atol=1e-2))
        except IndexError as error:
            return str(error).partition(" for ")[0]

    def is_right(self, lengths: list[int], own_pool: bool) -> bool:
        return self.replayed(lengths, own_pool) == expected(lengths, own_pool)

    def replayed(self, lengths: list[int], own_pool: bool) -> dict[str, Any]:
        backend, ordinary = self.backend, self.runner.token_to_kv_pool
        backend.use_sliding_window_kv_pool = own_pool
        backend.token_to_kv_pool = types.SimpleNamespace(
            translate_loc_from_full_to_swa=lambda slots: MAPPING[slots.long()]
        )
        shapes = {"local_query_start_loc": (20,), "local_seqused_k": (20,), "local_block_table": (20, CHUNK // PAGE)}
        buffers = {name: torch.full(shape, 99, dtype=torch.int32) for name, shape in shapes.items()}
        backend.decode_cuda_graph_local_attn_metadata = buffers
        backend.decode_cuda_graph_metadata = {"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}
        captured = types.SimpleNamespace(local_max_query_len=0, local_max_seq_len=0)
        metadata = types.SimpleNamespace(
            page_table=TABLE, cache_seqlens_int32=torch.tensor(lengths, dtype=torch.int32), local_attn_metadata=captured
        )
        backend._maybe_update_local_attn_metadata_for_replay(metadata, 3)
        backend.use_sliding_window_kv_pool, backend.token_to_kv_pool = False, ordinary
        read = []
        for row, length in enumerate(buffers["local_seqused_k"].tolist()[:3]):
            row_of_pages = buffers["local_block_table"][row, : -(-length // PAGE)]
            read.append((row_of_pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length].tolist())
        rest = [buffers["local_query_start_loc"][4:], buffers["local_seqused_k"][3:], buffers["local_block_table"][3:]]
        return {
            "slots": read,
            "starts": buffers["local_query_start_loc"][:4].tolist(),
            "largest": vars(captured),
            "rest is zero": not any(bool(part.any()) for part in rest),
        }


def expected(lengths: list[int], own_pool: bool) -> dict[str, Any]:
    found: list[list[int]] = []
    for row, length in enumerate(lengths):
        positions = torch.arange((length - 1) // CHUNK * CHUNK, length)
        slots = TABLE[row, positions // PAGE].long() * PAGE + positions % PAGE
        found.append((MAPPING[slots] if own_pool else slots).tolist())
    return {
        "slots": found,
        "starts": [0, 1, 2, 3],
        "rest is zero": True,
        "largest": {"local_max_query_len": 1, "local_max_seq_len": max(map(len, found))},
    }


if __name__ == "__main__":
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    telling.with_and_without(LocalAttention().look)
