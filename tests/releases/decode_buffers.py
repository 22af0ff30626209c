# SPDX-License-Identifier: Apache-2.0
"""The real buffers of 0.5.11's to 0.5.12.post1's decode graphs, and batches of a few rows to fill them with."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch


def buffers() -> Any:
    from sglang.srt.model_executor.cuda_graph_runner import DecodeInputBuffers

    return DecodeInputBuffers.create(
        device="cpu",
        max_bs=4,
        max_num_token=4,
        hidden_size=8,
        vocab_size=8,
        dtype=torch.float32,
        dp_size=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=1,
        encoder_len_fill_value=0,
        num_tokens_per_bs=1,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
        is_hybrid_swa=True,
    )


def fill(target: Any, rows: Sequence[int], slots: Sequence[int]) -> None:
    """Fill the buffers as a replay of the graph of four rows does before it runs."""
    count = len(rows)
    batch = types.SimpleNamespace(
        input_ids=torch.arange(count),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.full((count,), 9),
        out_cache_loc=torch.tensor(slots) + 100,
        out_cache_loc_swa=torch.tensor(slots, dtype=torch.int32),
        positions=torch.full((count,), 8),
        seq_lens_cpu=torch.full((count,), 9, dtype=torch.int32),
        mrope_positions=None,
        encoder_lens=None,
        mamba_track_indices=None,
        mamba_track_mask=None,
    )
    target.populate_from_forward_batch(
        forward_batch=batch,
        raw_bs=count,
        raw_num_token=count,
        bs=4,
        seq_len_fill_value=1,
        require_gathered_buffer=False,
        num_tokens_per_bs=1,
        nsa_enable_prefill_cp=False,
        enable_num_token_non_padded_flag=False,
    )


def breakable_runner_shares(decode_buffers: Any) -> str | list[str]:
    """The types that decode's and the breakable runner's slots have when they share memory, or why they cannot."""
    from sglang.srt.model_executor.breakable_cuda_graph_runner import BreakableCudaGraphRunner

    decode_buffers.share_buffers()
    runner = BreakableCudaGraphRunner.__new__(BreakableCudaGraphRunner)
    vars(runner).update(device="cpu", max_num_tokens=4, max_bs=4, is_multimodal=False)
    config = types.SimpleNamespace(hidden_size=8, dtype=torch.float32)
    model_runner = types.SimpleNamespace(device="cpu", is_hybrid_swa=True, dtype=torch.float32, model_config=config)
    try:
        runner._init_buffers(model_runner)
    except AssertionError as error:
        return str(error)
    return sorted({str(owner.out_cache_loc_swa.dtype) for owner in (decode_buffers, runner.buffers)})
