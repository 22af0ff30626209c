# SPDX-License-Identifier: Apache-2.0
"""Rows that hybrid models take for padding: real backends, called as the decode runner calls them."""

from __future__ import annotations

import types
from typing import Any

import torch

from cpu_sglang import one_batch, stand_ins
from tests.scenarios import telling

DRAFTS, ROWS = 4, 4
POOL = types.SimpleNamespace(
    get_mamba_indices=lambda rows: rows.to(torch.int32) + 100,
    translate_mamba_indices=lambda indices: indices,
    mamba_pool=types.SimpleNamespace(enable_linear_replayssm=False),
)


def verify(requests: int) -> types.SimpleNamespace:
    drafts = torch.zeros(requests * DRAFTS, dtype=torch.int64)
    return types.SimpleNamespace(draft_token=drafts, draft_token_num=DRAFTS, ragged_verify_layout=None)


def prepare(family: Any, mode: Any, lengths: list[int], spec_info: Any) -> list[list[int]]:
    """State slots, starts and requests of a batch that is padded to ROWS as the decode runner does it."""
    backend = family.__new__(family)
    vars(backend).update(
        pad_slot_id=-1,
        device="cpu",
        req_to_token_pool=POOL,
        topk=1,
        state_indices_list=[],
        query_start_loc_list=[],
        retrieve_next_token_list=[],
        retrieve_next_sibling_list=[],
        retrieve_parent_token_list=[],
        _fused_state_indices_ok=False,
    )
    backend.init_cuda_graph_state(ROWS, ROWS * DRAFTS)
    padding = ROWS - len(lengths)
    view = types.SimpleNamespace(
        batch_size=ROWS,
        forward_mode=mode,
        spec_info=spec_info,
        num_padding=padding,
        mamba_track_indices=None,
        req_pool_indices=torch.tensor([*range(1, len(lengths) + 1), *[0] * padding]),
        seq_lens=torch.tensor([*lengths, *[1] * padding]),
        seq_lens_cpu=torch.tensor([*lengths, *[1] * padding]),
    )
    if hasattr(backend, "init_forward_metadata_replay_cuda_graph"):
        backend.init_forward_metadata_replay_cuda_graph(
            ROWS, view.req_pool_indices, view.seq_lens, 0, None, mode, spec_info, view.seq_lens_cpu
        )
    else:
        backend.init_forward_metadata_out_graph(view)
    found = backend.forward_metadata
    return [found.mamba_cache_indices.tolist(), found.query_start_loc.tolist(), view.req_pool_indices.tolist()]


def main() -> None:
    stand_ins.install()
    one_batch.load_plugins()
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend, MambaAttnBackendBase
    from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    verifies, decodes = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
    found: dict[str, Any] = {
        family.__name__: {
            "one of length one": prepare(family, verifies, [9, 1, 9, 9], verify(4)),
            "all of length one": prepare(family, verifies, [1, 1, 1, 1], verify(4)),
            "one of length one, padded": prepare(family, verifies, [1, 9], verify(2)),
            "padded": prepare(family, verifies, [9, 8, 7], verify(3)),
            "no request": prepare(family, verifies, [], verify(0)),
            "decode": prepare(family, decodes, [9, 8, 7], None),
        }
        for family in (MambaAttnBackendBase, Mamba2AttnBackend, LightningAttentionBackend)
    }
    found["touched"] = [
        family.__name__
        for family in (MambaAttnBackendBase, LightningAttentionBackend)
        if hasattr(vars(family).get("_replay_metadata"), "__bcg_fix__")
    ]
    telling.result(found)


if __name__ == "__main__":
    main()
