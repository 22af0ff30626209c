# SPDX-License-Identifier: Apache-2.0
"""Two real ranks that gather Qwen4's n-gram ids in a replay which does not fill its graph, and counts beside those."""

from __future__ import annotations

import types

import pytest
import torch

from sglang_bcg_fixes.fixes import ngram_gather_unpadded as fix
from tests import processes, wheels
from tests.fixes import alone
from tests.wheels import NEWEST

FIX = "ngram_gather_unpadded"
BUSY = {"replayed": True, "normed": [11] * 3 + [5] * 3, "right": [True, True]}


def test_ranks_answer_as_eagerly_and_end_without() -> None:
    found = alone.found(FIX, "0.5.22", "tests.scenarios.idle_rank", "busy")
    assert found["applied"] == [FIX] and found["with"] == [BUSY, BUSY]
    assert all("allgather: invalid tensor size" in error for error in found["without"]), found


def test_the_next_release_counts_so_by_itself() -> None:
    found, _ = processes.beside(
        wheels.unpacked(NEWEST), "-m", "tests.scenarios.idle_rank", "busy", SGLANG_BCG_FIXES="off"
    )
    assert found["without"] == [BUSY, BUSY]


@pytest.mark.parametrize(
    ("is_max_len", "length", "tokens", "counts"),
    [
        # padded by the ranks to 11 tokens, and by the graph to 16
        (True, 22, 16, [16, 16]),
        (True, 32, 16, None),
        # eager batches, of which the last is not padded to one length
        (True, 22, 11, None),
        (False, 16, 11, None),
        (True, None, 16, None),
    ],
)
def test_only_what_is_padded_beyond_the_ranks_is_counted_anew(
    is_max_len: bool, length: int | None, tokens: int, counts: list[int] | None
) -> None:
    batch = types.SimpleNamespace(
        dp_padding_mode=types.SimpleNamespace(is_max_len=lambda: is_max_len),
        global_dp_buffer_len=length,
        global_num_tokens_gpu=torch.tensor([11, 11]),
        dp_local_start_pos=11,
        dp_local_num_tokens=11,
    )
    found = fix.counted(batch, tokens)
    if counts is None:
        assert found is batch
    else:
        assert found.global_num_tokens_gpu.tolist() == counts and found.global_dp_buffer_len == sum(counts)
        assert found.dp_local_start_pos is found.dp_local_num_tokens is None
    assert batch.global_num_tokens_gpu.tolist() == [11, 11] and batch.dp_local_start_pos == 11
