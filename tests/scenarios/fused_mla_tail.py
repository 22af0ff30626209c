# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of sparse latent attention, with a backend of real rows only."""

from __future__ import annotations

import types
from typing import Any

import torch

from cpu_sglang import one_batch
from tests.scenarios import padded_break, telling

HEADS, ROWS, REAL, SIZE = 2, 8, 5, 4


def attend(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return query.flatten(1) + 1


def run(forward_mla: Any) -> list[Any]:
    query = torch.arange(HEADS * ROWS * SIZE).view(HEADS, ROWS, SIZE).float()
    absorbed = torch.full_like(query, float("nan"))
    output = torch.full((ROWS, HEADS * SIZE), float("nan"))
    forward_mla.bcg_mla_bmm_then_unified_attention(
        *(query, torch.eye(SIZE).expand(HEADS, -1, -1), absorbed, absorbed.transpose(0, 1)),
        *(torch.zeros(ROWS, 1, SIZE), output, False, 0, torch.zeros(ROWS, HEADS, 2), torch.zeros(ROWS, 1, 2)),
    )
    return padded_break.tail_of(output, query.transpose(0, 1).flatten(1)[:REAL] + 1)


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    from sglang.srt.layers import radix_attention
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    batch = types.SimpleNamespace(num_token_non_padded_cpu=REAL, out_cache_loc=torch.arange(ROWS))
    padded_break.enter(radix_attention, batch, ROWS, REAL)
    radix_attention.get_attn_backend = lambda: types.SimpleNamespace(forward=attend)
    telling.with_and_without(lambda: run(forward_mla))


if __name__ == "__main__":
    main()
