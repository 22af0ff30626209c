# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next, Qwen3.5, Kimi-Linear answer wrongly on cache hits (--page-size from 128)

Symptom: Qwen3-Next, Qwen3.5 and Kimi-Linear with --page-size 128 or more and the extra-buffer strategy of the Mamba
prefix cache answer wrong wherever a cached prefix is found: with pages of 128, the state after 448 tokens passes for
that after 896. Nothing in the log.
Cause: The kernels keep a state every 64 tokens. The checkpoint of a prompt is looked up among them as if they kept one
for every page, where a page is larger.
Change: It is looked up by the 64 tokens that they do keep one for. With smaller pages nothing changes. Mamba2 layers
have more wrong with them, which mamba2_checkpoint_grid fixes.
Remove when: No release before 0.5.19 has to be served.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import DELTA_ATTENTION, EXTRA_BUFFERS, GATED_DELTA, PAGES_OF_128
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, PAGES_OF_ONE_TOKEN
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
LOOK_UP = f"{BACKENDS}:MambaAttnBackendBase._init_track_ssm_indices"
LINEAR = "sglang.srt.layers.attention.linear"
KEPT_BY = (f"{LINEAR}.gdn_backend:GDNAttnBackend", f"{LINEAR}.kda_backend:KDAAttnBackend")
# the kernels moved in 0.5.16
KERNELS = ("sglang.kernels.ops.attention.fla.chunk_delta_h", "sglang.srt.layers.attention.fla.chunk_delta_h")
PAGES = "sglang.srt.server_args:ServerArgs.mamba_cache_chunk_size"
# as each release spells it
OF_PAGES = (
    "mamba_cache_chunk_size = get_global_server_args().mamba_cache_chunk_size",
    "mamba_cache_chunk_size = get_server_args().mamba_cache_chunk_size",
    "chunk_size = mamba_cache_chunk_size()",
)


def probe(source: Source) -> Finding:
    look_up = source.need(LOOK_UP)
    if look_up.mentions("state_chunk_size = self.mamba_chunk_size"):
        return fixed("a state is looked up by the chunks that it is kept for", look_up)
    if look_up.mentions("num_h_states = (extend_seq_lens - 1) // FLA_CHUNK_SIZE + 1"):
        return absent("a state is looked up by the chunks of the kernels", look_up)
    if not any(look_up.mentions(f"{spelled}\n") for spelled in OF_PAGES):
        return drifted("a state is looked up", look_up)
    pages, kernels = source.need(PAGES), source.need(*(f"{module}:CHUNK_SIZE" for module in KERNELS))
    return affected("a state is looked up by pages where they are larger than its chunks", look_up, pages, kernels)


def look_up(result: tuple[Tensor, ...], self: Any, mamba_cache_indices: Tensor, forward_batch: Any) -> Any:
    import torch
    from sglang.srt.server_args import get_global_server_args

    tracked = get_global_server_args().mamba_cache_chunk_size
    # imported with the kernels, from one of two places
    chunk = next(sys.modules[module].CHUNK_SIZE for module in KERNELS if module in sys.modules)
    if tracked <= chunk:
        return result
    kept = (forward_batch.extend_seq_lens.cpu() + chunk - 1) // chunk
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))[:-1]
    lengths = (forward_batch.mamba_track_seqlens - forward_batch.extend_prefix_lens).cpu()
    # the others end at a boundary, and their state is in the slot of the request
    inside = forward_batch.mamba_track_mask.cpu() & (lengths % tracked != 0)
    sources = before + lengths // tracked * tracked // chunk
    return (sources[inside].to(result[0].device), *result[1:])


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/33515",),
    probe=probe,
    # inherited: the other families keep the original
    patches=tuple(PatchPoint((f"{owner}._init_track_ssm_indices",), How.AFTER, look_up) for owner in KEPT_BY),
    workarounds=(*PAGES_OF_ONE_TOKEN, *CHECKPOINTS_OFF),
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(GATED_DELTA | DELTA_ATTENTION, PAGES_OF_128, EXTRA_BUFFERS),
)
