# SPDX-License-Identifier: Apache-2.0
"""The padded rows behind the break of DeepSeek-V4, with a backend of real rows only."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch

from cpu_sglang import one_batch
from sglang_bcg_fixes.fixes import deepseek_v4_tail_uninitialised
from tests.scenarios import padded_break, telling

HEADS, ROWS, REAL, SIZE = 2, 8, 5, 4


def attend(q: torch.Tensor, **options: Any) -> torch.Tensor:
    return q.flatten(1) + 1


def run(deepseek_v4: Any) -> list[Any]:
    query = torch.arange(ROWS * HEADS * SIZE).view(ROWS, HEADS, SIZE).float()
    output = torch.full_like(query, float("nan"))
    deepseek_v4.bcg_deepseek_v4_attention_with_output(query, query, output, 0, 4, torch.zeros(HEADS), False)
    return padded_break.tail_of(output, query[:REAL] + 1)


def main() -> None:
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models import deepseek_v4

    fields = {field.name for field in dataclasses.fields(ForwardBatch)}
    numbers = {name: REAL for name in deepseek_v4_tail_uninitialised.REAL_ROWS if name in fields}
    batch = types.SimpleNamespace(**numbers, out_cache_loc=torch.arange(ROWS))
    padded_break.enter(deepseek_v4, batch, ROWS, REAL)
    deepseek_v4.get_attn_backend = lambda: types.SimpleNamespace(forward=attend)
    telling.with_and_without(lambda: run(deepseek_v4))


if __name__ == "__main__":
    main()
