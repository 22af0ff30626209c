# SPDX-License-Identifier: Apache-2.0
"""Next chat turn wrong after a long enough answer (NemotronH, Falcon-H1, Granite 4)

Symptom: NemotronH, Falcon-H1 and Granite 4 answer wrong where the prefix cache resumes from a decoded token, as
it does in the next turn of a chat once an answer has crossed a multiple of --mamba-track-interval. In the upstream
report the logits differ from those of a cold prefill by a KL divergence of 1.55. Nothing in the log; default flags.
Cause: The slots to save to are copied to the front of a buffer that is as long as the largest decode graph, and the
whole buffer is handed on. The layers take as many entries as the graph has rows from its end: slot 0, slots of other
rows, or slots that the last batch of that size left there. So the slot that the scheduler puts into the cache keeps an
old state, and the checkpoint of another request may be overwritten. Only the largest graph is right.
Change: Mamba2 layers get the front of the buffer, as long as the graph. It is the same memory, so a graph that was
captured with it reads the new slots in each replay. Gated delta net and KDA read from the front and are left alone.
Remove when: No release before 0.5.17 has to be served.
"""

from __future__ import annotations

from typing import Any

from sglang_bcg_fixes.anatomy.launches import DECODE_GRAPHS, EXTRA_BUFFERS, MAMBA2_LAYERS
from sglang_bcg_fixes.anatomy.workarounds import DECODE_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, fixed, wrong

BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
MAMBA2 = f"{BACKENDS}:Mamba2AttnBackend"
FROM_THE_END = "mamba_track_indices[-num_decodes:]"


def probe(source: Source) -> Finding:
    mixer = source.need(f"{MAMBA2}.forward")
    if not mixer.mentions(FROM_THE_END):
        return absent("Mamba2 layers write no checkpoints in decode", mixer)
    if not mixer.mentions(f"self.forward_metadata.{FROM_THE_END}"):
        return absent("the slots come from the batch, and are as many as its rows", mixer)
    prepare = source.need(f"{BACKENDS}:MambaAttnBackendBase._replay_metadata")
    if prepare.mentions("track_buf = self.mamba_track_indices_buf[:bs]"):
        return fixed("the buffer of slots is handed on as long as the graph", prepare.header)
    if prepare.mentions("track_buf[:len(mamba_track_indices)].copy_"):
        return affected("the whole buffer of slots is handed on, and read from its end", mixer, prepare)
    return drifted("the slots are prepared", mixer, prepare)


def without_the_tail(metadata: Any, self: Any, bs: int, *_: Any, **__: Any) -> Any:
    # None without the extra-buffer strategy, and with speculative decoding
    if metadata.mamba_track_indices is not None:
        metadata.mamba_track_indices = metadata.mamba_track_indices[:bs]
    return metadata


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/32555",),
    probe=probe,
    # inherited: the other families keep the original
    patches=(PatchPoint((f"{MAMBA2}._replay_metadata",), How.AFTER, without_the_tail),),
    workarounds=DECODE_GRAPHS_OFF,
    verify=("falcon_h1_checkpoints",),
    concerns=wrong(MAMBA2_LAYERS, EXTRA_BUFFERS, DECODE_GRAPHS),
)
