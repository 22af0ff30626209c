"""The draft model's extend step counts its new tokens twice

Symptom: EAGLE and EAGLE3 with the Triton attention backend and CUDA graphs accept fewer draft tokens than they should;
answers stay right, speed is lost, nothing is in the log. Without graphs the accept length is as it should be.
Cause: seq_lens is prefix plus new tokens. The graph path of the Triton backend lists the cache slots of all of them as
prefix, and the extend kernel is handed the keys and values of the new tokens once more, without the causal mask between
the two. FlashAttention is right in every release: there seq_lens is what its kernel wants.
Change: A fix would subtract the new tokens from the prefix in the graph path. This version only watches for it.
Remove when: No release before 0.5.13 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import DRAFT_WITHOUT_TRITON
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed, unknown

BACKEND = "sglang.srt.layers.attention.triton_backend:TritonAttnBackend"


def probe(source: Source) -> Finding:
    update = source.find(f"{BACKEND}._update_draft_extend_buffers")
    if update:
        lengths = update.need_assignment_to("kv_lens")
        if lengths.mentions("seq_lens - extend_seq_lens"):
            return fixed("the graph path takes the new tokens off the prefix", update)
        return unknown("the graph path computes the prefix in a way that no known release does", update)
    replay = source.need(f"{BACKEND}.init_forward_metadata_replay_cuda_graph")
    if replay.mentions("is_draft_extend") and not replay.mentions("extend_seq_lens"):
        return affected("the graph path takes seq_lens, new tokens included, for the prefix", replay)
    return unknown("the graph path computes the prefix in a way that no known release does", replay)


FIX = Fix(
    id="draft_extend_cache_extent",
    doc=__doc__,
    upstream=(
        "https://github.com/sgl-project/sglang/pull/26512",
        "https://github.com/sgl-project/sglang/pull/26628",
        "https://github.com/sgl-project/sglang/pull/26651",
    ),
    probe=probe,
    known={
        "290107dddece": "TritonAttnBackend.init_forward_metadata_replay_cuda_graph, 0.5.11 to 0.5.12.post1",
        "f2a7047d74ea": "TritonAttnBackend._update_draft_extend_buffers, 0.5.13 to 0.5.13.post1",
        "b5aaa5eb8384": "TritonAttnBackend._update_draft_extend_buffers, 0.5.14 to 0.5.15.post1",
        "4f41cb677cbc": "TritonAttnBackend._update_draft_extend_buffers, 0.5.16 to 0.5.18",
        "f253c4d3d8e9": "TritonAttnBackend._update_draft_extend_buffers, 0.5.19",
        "f7d2e747a62b": "TritonAttnBackend._update_draft_extend_buffers, 0.5.20 to 0.5.21",
        "dc1d2ef26ad2": "TritonAttnBackend._update_draft_extend_buffers, 0.5.22",
        "bc7b9ed931f6": "TritonAttnBackend._update_draft_extend_buffers, 0.5.23",
    },
    mitigations=DRAFT_WITHOUT_TRITON,
)
