"""Tables of draft steps as the real backend allots them, filled with pages by the function that its replays call."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json, types
from unittest import mock
from cpu_sglang import stand_ins
stand_ins.install()
import torch
from sglang.srt.layers.attention import flashattention_backend as module
from sglang_bcg_fixes.fixes.expand_table_overflow import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

STEPS, TOPK, PAGE = 4, 2, 2
# one request whose last page is full: the drafts of its branches have two pages each
slots = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
# and one whose last page is half full: its branches begin with a copy of it
late = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])
rows, lengths = torch.cat([slots, late]), torch.tensor([0, 1], dtype=torch.int32)

def step(number):
    backend = mock.MagicMock(spec=module.FlashAttentionBackend, device="cpu", page_size=PAGE, topk=TOPK,
        speculative_step_id=number, speculative_num_steps=STEPS, speculative_num_draft_tokens=8, max_context_len=64,
        req_to_token=torch.zeros(1, 64), use_sliding_window_kv_pool=False, has_local_attention=False,
        is_encoder_decoder=False, attn_cp_size=1, has_swa=False, use_mla=False, _get_scheduler_metadata=None)
    module.FlashAttentionBackend.init_cuda_graph_state(backend, 2, 4)
    buffers = backend.draft_decode_metadata_topk_expand
    table, seqlens = buffers["page_table"], buffers["cache_seqlens"]
    try:
        module.draft_decode_set_expand_metadata(cache_seqlens_int32=seqlens, page_table=table, last_page_lens=lengths,
            decode_length=number + 1, cache_loc=rows, topk=TOPK, page_size=PAGE)
    except (RuntimeError, IndexError) as error:
        return str(error).partition(" with size")[0]
    read = []
    for row, (pages, length, last) in enumerate(zip(table, seqlens, lengths.repeat_interleave(TOPK))):
        seen = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        read.append(seen[last:].tolist())
    return read == rows[:, : number + 1].tolist()

def look():
    return [step(number) for number in range(STEPS - 1)]

ledger, found = Ledger(), {"without": look()}
ledger.apply(FIX)
print("RESULT", json.dumps({**found, "with": look()}))
"""


@pytest.mark.parametrize("release", ["0.5.11", "0.5.12.post1"])
def test_a_step_has_room_for_the_pages_it_is_given(release_root: Callable[[str], pathlib.Path], release: str) -> None:
    found, _ = processes.beside(release_root(release), "-c", CODE, TORCHDYNAMO_DISABLE="1")
    assert found["with"] == [True, True, True]
    out_of_bounds = "index 2 is out of bounds for dimension 1"
    assert found["without"] == [out_of_bounds, True, True]
