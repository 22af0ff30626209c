# SPDX-License-Identifier: Apache-2.0
"""Ling 2.5 and Ring 2.5 answer wrongly on prefix-cache hits (extra_buffer)

Symptom: Ling 2.5 and Ring 2.5 with the extra-buffer strategy of the Mamba prefix cache, which is the default from
0.5.14, answer wrong wherever a cached prefix is found: after every prompt whose length is no multiple of the chunk of
64 tokens (or of the page, where that is larger), and after every answer that has crossed a multiple of
--mamba-track-interval. In the upstream report AIME collapses. Nothing in the log.
Cause: A prefill is to save the state of the last whole chunk. The layers save that of the last token, so those behind
the boundary count twice when the prefix is found. A decode step at a boundary is to save its state too. The layers
save none, and the scheduler caches a slot that holds another state.
Change: For a prompt that does not end on a boundary the layer runs once more on the tokens up to it, with the slot of
the checkpoint for its state. That takes as long as the layer's attention did, which is little beside its projections;
answers do not change by a bit. Decode saves its states by the method that other linear attention uses.
Remove when: No release before 0.5.17 has to be served.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, LIGHTNING_LAYERS
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

LIGHTNING = "sglang.srt.layers.attention.linear.lightning_backend:LightningAttentionBackend"
SHARED = "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase"
SAVE_DECODE = "self._track_mamba_state_decode"
THE_END = "ssm_states[dst_masked] = ssm_states[src_masked]"


def probe(source: Source) -> Finding:
    extend, decode = source.need(f"{LIGHTNING}.forward_extend"), source.need(f"{LIGHTNING}.forward_decode")
    if not extend.mentions("mamba_track_mask"):
        return absent("lightning attention writes no checkpoints", extend, decode)
    if "self._prepare_seg_la_track_store" in extend.calls and SAVE_DECODE in decode.calls:
        return fixed("the layers save the state of the boundary, and that of decode", extend, decode)
    if not extend.mentions(THE_END) or extend.mentions("track_ssm") or decode.mentions("track"):
        return drifted("the layers save states", extend, decode)
    prepare = source.need(f"{LIGHTNING}.init_forward_metadata")
    if not prepare.mentions("self.forward_metadata = BailingLinearMetadata.prepare_mixed("):
        return drifted("a prefill is prepared", extend, decode, prepare)
    save = source.need(f"{SHARED}._track_mamba_state_decode")
    return affected("the layers save the state of the last token, and none in decode", extend, decode, prepare, save)


def decode_slots_are_prepared(source: Source) -> bool:
    """Tell whether the method that saves decode states takes the slots from what was prepared."""
    save = source.need(f"{SHARED}._track_mamba_state_decode")
    return save.mentions("self.forward_metadata.mamba_track_indices")


@dataclasses.dataclass(frozen=True)
class Boundary:
    """The part of a batch that has to run once more: of each request that asks for it, the tokens up to the boundary.

    `metadata` and `batch` are what the backend reads, with the slots of the checkpoints for those of the requests.
    """

    tokens: Tensor
    slots: Tensor
    checkpoints: Tensor
    metadata: Any
    batch: Any


def prepare_extend(result: None, self: Any, forward_batch: Any) -> None:
    metadata = self.forward_metadata
    # the metadata is made for each batch, and for each it is prepared anew
    metadata.mamba_track_indices = forward_batch.mamba_track_indices
    metadata.boundary = boundary_of(metadata, forward_batch)


def boundary_of(metadata: Any, forward_batch: Any) -> Boundary | None:
    import torch
    from sglang.srt.server_args import get_global_server_args

    mode, mask = forward_batch.forward_mode, forward_batch.mamba_track_mask
    if mask is None or not mode.is_extend() or mode.is_target_verify() or not mask.any():
        return None
    chunk = get_global_server_args().mamba_cache_chunk_size
    rows = metadata.num_prefills
    # one copy to the host, as the backends of other linear attention make
    numbers = torch.stack(
        [
            mask[:rows].long(),
            forward_batch.mamba_track_seqlens[:rows] - forward_batch.extend_prefix_lens[:rows],
            forward_batch.extend_seq_lens[:rows].long(),
            metadata.query_start_loc[:rows].long(),
        ]
    ).tolist()
    ends = [
        (row, start, tracked // chunk * chunk)
        for row, (wanted, tracked, length, start) in enumerate(zip(*numbers, strict=True))
        # at the end of the prompt the state is in the slot of the request
        if wanted and tracked // chunk * chunk < length
    ]
    if not ends:
        return None
    device = mask.device
    chosen = torch.tensor([row for row, _, _ in ends], device=device)
    lengths = torch.tensor([length for _, _, length in ends], device=device)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(metadata.query_start_loc.dtype)
    checkpoints = forward_batch.mamba_track_indices[chosen]
    batch = copy.copy(forward_batch)
    batch.mamba_track_mask = None
    batch.extend_start_loc, batch.extend_seq_lens = starts[:-1], lengths
    return Boundary(
        tokens=torch.cat([torch.arange(start, start + length) for _, start, length in ends]).to(device),
        slots=metadata.mamba_cache_indices[chosen],
        checkpoints=checkpoints,
        metadata=dataclasses.replace(
            metadata,
            batch_size=len(ends),
            query_start_loc=starts,
            mamba_cache_indices=checkpoints.to(metadata.mamba_cache_indices.dtype),
            num_prefills=len(ends),
            num_prefill_tokens=sum(length for _, _, length in ends),
            num_decodes=0,
            has_initial_states=metadata.has_initial_states[chosen],
            q_lengths=starts.diff(),
        ),
        batch=batch,
    )


def prepare_decode(result: None, self: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    slots = forward_batch.mamba_track_indices
    # None without checkpoints
    if slots is not None:
        # this memory is the one that graphs are captured with, and the slots of unified memory are virtual
        prepared = self.mamba_track_indices_buf[: len(slots)]
        prepared.copy_(self._translate_mamba_indices(slots))
        self.forward_metadata.mamba_track_indices = prepared


def extend(
    original: Callable[..., Tensor],
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    metadata = self.forward_metadata
    boundary: Boundary | None = getattr(metadata, "boundary", None)
    if boundary is None:
        return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    states = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id).temporal
    before = states[boundary.slots]
    output = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    states[boundary.checkpoints] = before
    parts = (part[boundary.tokens] for part in (q, k, v))
    self.forward_metadata = boundary.metadata
    try:
        original(self, *parts, layer, boundary.batch, *args, **kwargs)
    finally:
        self.forward_metadata = metadata
    return output


def save_decode(
    output: Tensor, self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, *_: Any, **__: Any
) -> Tensor:
    states = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    slots = self.forward_metadata.mamba_cache_indices
    self._track_mamba_state_decode(forward_batch, states.conv[0], states.temporal, slots)
    return output


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/29973",),
    probe=probe,
    patches=(
        PatchPoint((f"{LIGHTNING}.init_forward_metadata",), How.AFTER, prepare_extend),
        PatchPoint(
            (f"{LIGHTNING}.init_forward_metadata_out_graph",),
            How.AFTER,
            prepare_decode,
            needed=decode_slots_are_prepared,
        ),
        PatchPoint((f"{LIGHTNING}.forward_extend",), How.AROUND, extend),
        PatchPoint((f"{LIGHTNING}.forward_decode",), How.AFTER, save_decode),
    ),
    workarounds=(*CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("qwen3_next_prefix_cache",),
    concerns=wrong(LIGHTNING_LAYERS, EXTRA_BUFFERS),
)
