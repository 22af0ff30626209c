# SPDX-License-Identifier: Apache-2.0
"""Tables of draft steps as the real backend allots them, filled with pages as its replays do it."""

from __future__ import annotations

from unittest import mock

import torch

from cpu_sglang import stand_ins
from sglang_bcg_fixes.fixes import expand_table_overflow
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import telling

FIX = declared_in(expand_table_overflow)

STEPS, TOPK, PAGE = 4, 2, 2
# one request whose last page is full: the drafts of its branches have two pages each
SLOTS = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
# and one whose last page is half full: its branches begin with a copy of it
LATE = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])
ROWS, LENGTHS = torch.cat([SLOTS, LATE]), torch.tensor([0, 1], dtype=torch.int32)


def step(number: int) -> bool | str:
    from sglang.srt.layers.attention import flashattention_backend as module

    backend = mock.MagicMock(
        spec=module.FlashAttentionBackend,
        device="cpu",
        page_size=PAGE,
        topk=TOPK,
        speculative_step_id=number,
        speculative_num_steps=STEPS,
        speculative_num_draft_tokens=8,
        max_context_len=64,
        req_to_token=torch.zeros(1, 64),
        use_sliding_window_kv_pool=False,
        has_local_attention=False,
        is_encoder_decoder=False,
        attn_cp_size=1,
        has_swa=False,
        use_mla=False,
        _get_scheduler_metadata=None,
    )
    module.FlashAttentionBackend.init_cuda_graph_state(backend, 2, 4)
    buffers = backend.draft_decode_metadata_topk_expand
    table, seqlens = buffers["page_table"], buffers["cache_seqlens"]
    try:
        module.draft_decode_set_expand_metadata(
            cache_seqlens_int32=seqlens,
            page_table=table,
            last_page_lens=LENGTHS,
            decode_length=number + 1,
            cache_loc=ROWS,
            topk=TOPK,
            page_size=PAGE,
        )
    except (RuntimeError, IndexError) as error:
        return str(error).partition(" with size")[0]
    read: list[list[int]] = []
    for pages, length, last in zip(table, seqlens, LENGTHS.repeat_interleave(TOPK), strict=True):
        seen = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        read.append(seen[last:].tolist())
    return read == ROWS[:, : number + 1].tolist()


def look() -> list[bool | str]:
    return [step(number) for number in range(STEPS - 1)]


if __name__ == "__main__":
    stand_ins.install()
    telling.before_and_after(FIX, look)
