# SPDX-License-Identifier: Apache-2.0
"""NemotronH, Falcon-H1, Granite 4 answer wrongly on cache hits of batched prompts

Symptom: NemotronH, Falcon-H1 and Granite 4 with the extra-buffer strategy of the Mamba prefix cache, which is the
default from 0.5.14, answer wrong wherever a prefix is found whose prompt was computed together with others. In the
upstream report Nemotron 3 Super loses on AIME. A page that is larger than the chunk does it to single prompts too.
Nothing in the log.
Cause: The scan keeps a state every chunk of the whole batch, counted from its first token. The checkpoint of a prompt
is looked up as if every prompt had chunks of its own, so it is the state of another place or of another prompt. The
right one is among them only where the prompt's last boundary falls on a boundary of the batch.
Change: States on the batch's boundaries are taken from where they are. For each of the others the scan runs once more,
from the last boundary of the batch or the beginning of the prompt, which is less than a chunk a prompt. Answers do not
change by a bit.
Remove when: No release before 0.5.20 has to be served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import EXTRA_BUFFERS, MAMBA2_LAYERS
from sglang_bcg_fixes.anatomy.workarounds import CHECKPOINTS_OFF, PREFIX_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
MAMBA2 = f"{BACKENDS}:Mamba2AttnBackend"
LOOK_UP = f"{BACKENDS}:MambaAttnBackendBase._init_track_ssm_indices"
SAVE = f"{BACKENDS}:MambaAttnBackendBase._track_mamba_state_extend"
SCAN = (
    "sglang.kernels.ops.mamba.triton_ops.ssd_combined:mamba_chunk_scan_combined",
    "sglang.srt.layers.attention.mamba.ops.ssd_combined:mamba_chunk_scan_combined",
)
METADATA = "sglang.srt.layers.attention.mamba.mamba2_metadata:Mamba2Metadata"
MIXERS = "sglang.srt.layers.attention.mamba.mamba"
MIXER = f"{MIXERS}:MambaMixer2.forward"


def probe(source: Source) -> Finding:
    forward, mixer = source.need(f"{MAMBA2}.forward"), source.need(MIXER)
    if not forward.mentions("self._track_mamba_state_extend("):
        return absent("Mamba2 layers write no checkpoints in prefill", forward)
    look_up = source.need(LOOK_UP)
    if look_up.mentions("track_ssm_recompute_dst"):
        return fixed("a state that is not on the batch's boundaries is computed", forward, look_up)
    if not look_up.mentions("isinstance(self, Mamba2AttnBackend)") or not look_up.mentions(
        "track_ssm_src_offset[1:] = torch.cumsum(num_h_states[:-1], dim=0)"
    ):
        return drifted("checkpoints are looked up", forward, look_up)
    called = "intermediate_states, varlen_state = mamba_chunk_scan_combined("
    if not (mixer.mentions(called) and mixer.mentions("seq_idx=mixed_metadata.seq_idx")):
        return drifted("the layer calls the scan", forward, look_up, mixer)
    read = (
        *(forward, look_up, mixer),
        source.need(f"{MAMBA2}.init_forward_metadata"),
        source.need(f"{BACKENDS}:MambaAttnBackendBase._init_track_conv_indices"),
        source.need(SAVE),
        source.need(f"{METADATA}._query_start_loc_to_chunk_indices_offsets"),
        source.need(*SCAN),
    )
    return affected("checkpoints are looked up as if every prompt had chunks of its own", *read)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The tokens from which states are computed that the scan of a batch does not keep, packed one after the other.

    Each begins at a boundary of the batch, with the state in `kept` there, or with its prompt, one of `prompts`.
    """

    tokens: Tensor
    kept: Tensor
    prompts: Tensor
    begins_with_prompt: Tensor
    starts: Tensor
    seq_idx: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor


# on the one tensor of a batch that the scan gets as it was made; where the layer is called from does not matter then
PIECES = "bcg_fixes_pieces"


def look_up(result: None, self: Any, forward_batch: Any) -> None:
    import torch

    metadata = self.forward_metadata
    if metadata.track_ssm_h_src is None or metadata.mixed_metadata is None:
        return
    chunk = metadata.mixed_metadata.chunk_size
    rows = forward_batch.mamba_track_mask.nonzero(as_tuple=True)[0]
    starts = metadata.query_start_loc
    # the convolution's window ends where the checkpoint is
    places = torch.stack([rows, starts[rows], metadata.track_conv_indices[:, -1] + 1, starts[rows + 1]], 1).tolist()
    # the state at the end of a prompt is in the slot of its request
    inside = [(row, start, place) for row, start, place, end in places if place < end]
    off_grid = [(row, start, place) for row, start, place in inside if place % chunk]
    # those that are computed come after those that are kept
    numbers = iter(range(-(-metadata.num_prefill_tokens // chunk), 1 << 31))
    sources = [next(numbers) if place % chunk else place // chunk for _, _, place in inside]
    device = rows.device
    metadata.track_ssm_h_src = torch.tensor(sources, dtype=torch.int64, device=device)
    metadata.track_ssm_h_dst = forward_batch.mamba_track_indices[[row for row, _, _ in inside]]
    if off_grid:
        setattr(metadata.mixed_metadata.seq_idx, PIECES, pieces_of(off_grid, chunk, metadata, device))


def pieces_of(off_grid: list[tuple[int, int, int]], chunk: int, metadata: Any, device: Any) -> Pieces:
    import torch

    begins = [max(start, place // chunk * chunk) for _, start, place in off_grid]
    lengths = torch.tensor([place - begin for (_, _, place), begin in zip(off_grid, begins, strict=True)])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(metadata.query_start_loc.dtype)
    total = int(starts[-1])
    indices, offsets = metadata._query_start_loc_to_chunk_indices_offsets(starts, chunk, total)
    on_host = Pieces(
        tokens=torch.cat([torch.arange(begin, place) for (_, _, place), begin in zip(off_grid, begins, strict=True)]),
        kept=torch.tensor([begin // chunk for begin in begins]),
        prompts=torch.tensor([row for row, _, _ in off_grid]),
        begins_with_prompt=torch.tensor(
            [begin == start for (_, start, _), begin in zip(off_grid, begins, strict=True)]
        ),
        starts=starts,
        seq_idx=torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None],
        chunk_indices=indices,
        chunk_offsets=offsets,
    )
    return Pieces(**{name: tensor.to(device) for name, tensor in vars(on_host).items()})


def scan(
    original: Callable[..., Any], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any, **kwargs: Any
) -> Any:
    import torch

    result = original(x, dt, A, B, C, *args, **kwargs)
    pieces = getattr(kwargs["seq_idx"], PIECES, None)
    if pieces is None:
        return result
    kept, ends = result
    initial = kwargs["initial_states"]
    of_prompts = torch.zeros_like(kept[0, pieces.kept]) if initial is None else initial[pieces.prompts].to(kept.dtype)
    inputs = (part[:, pieces.tokens] for part in (x, dt))
    states = (part[:, pieces.tokens] for part in (B, C))
    others = kwargs | {
        "seq_idx": pieces.seq_idx,
        "chunk_indices": pieces.chunk_indices,
        "chunk_offsets": pieces.chunk_offsets,
        "cu_seqlens": pieces.starts,
        "initial_states": torch.where(pieces.begins_with_prompt[:, None, None, None], of_prompts, kept[0, pieces.kept]),
        "out": torch.empty_like(x[:, pieces.tokens]),
    }
    _, computed = original(*inputs, A, *states, *args, **others)
    return torch.cat([kept, computed[None].to(kept.dtype)], dim=1), ends


FIX = Fix(
    upstream=(
        "https://github.com/sgl-project/sglang/issues/31833",
        "https://github.com/sgl-project/sglang/pull/33450",
        "https://github.com/sgl-project/sglang/pull/37836",
    ),
    probe=probe,
    patches=(
        PatchPoint((f"{MAMBA2}.init_forward_metadata",), How.AFTER, look_up),
        # not in its own module, which is imported in the middle of the others
        PatchPoint((f"{MIXERS}:mamba_chunk_scan_combined",), How.AROUND, scan),
    ),
    workarounds=(*CHECKPOINTS_OFF, *PREFIX_CACHE_OFF),
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(MAMBA2_LAYERS, EXTRA_BUFFERS),
)
