"""A request of length one is taken for padding by the state of hybrid models

Symptom: With speculative decoding and CUDA graphs, the last request of a batch of a hybrid model (gated delta net,
Mamba2, lightning attention) loses its state whenever another request of the batch has length 1: a wrong answer, nothing
in the log.
Cause: The number of padded rows is not handed down but guessed: it is how often the fill value, 1, occurs in seq_lens.
The state index of that many last rows is set to -1, and the last row is a real request.
Change: A fix would hand down the number of padded rows. This version only watches for it.
Remove when: No release before 0.5.14 has to be served, or none before 0.5.17 with Bailing's linear models.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import DECODE_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Definition, Source, affected, fixed, unknown

BACKENDS = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
LIGHTNING = "sglang.srt.layers.attention.linear.lightning_backend"
FAMILIES = (
    ("gated delta net and KDA", f"{BACKENDS}:MambaAttnBackendBase"),
    ("Mamba2", f"{BACKENDS}:Mamba2AttnBackend"),
    ("lightning attention", f"{LIGHTNING}:LightningAttentionBackend"),
)


def probe(source: Source) -> Finding:
    shared = source.need(f"{BACKENDS}:MambaAttnBackendBase._replay_metadata")
    read: list[Definition] = [shared.header]
    wrong = []
    for family, owner in FAMILIES:
        caller = source.need(
            f"{owner}.init_forward_metadata_out_graph", f"{owner}.init_forward_metadata_replay_cuda_graph"
        )
        read.append(caller)
        if "self._replay_metadata" not in caller.calls:
            return unknown(f"{family} prepares a replay in a way that no known release does", *read)
        if not caller.mentions("num_padding="):
            wrong.append(family)
    if wrong:
        return affected(f"the number of padded rows is guessed from seq_lens for {', '.join(wrong)}", *read)
    return fixed("the number of padded rows is handed down", *read)


FIX = Fix(
    id="mamba_padding_miscounted",
    doc=__doc__,
    upstream=("https://github.com/sgl-project/sglang/pull/27120",),
    probe=probe,
    known={
        "c7cd5adf60fc": "MambaAttnBackendBase._replay_metadata's header, 0.5.11 to 0.5.13.post1",
        "6b57c352643e": "MambaAttnBackendBase.init_forward_metadata_replay_cuda_graph, 0.5.11 to 0.5.12.post1",
        "6ecde0a4725a": "Mamba2AttnBackend.init_forward_metadata_replay_cuda_graph, 0.5.11 to 0.5.12.post1",
        "ab21aeaf4e9b": "LightningAttentionBackend.init_forward_metadata_replay_cuda_graph, 0.5.11 to 0.5.12.post1",
        "5c59627db670": "MambaAttnBackendBase.init_forward_metadata_out_graph, 0.5.13 to 0.5.13.post1",
        "b25b9e468cbf": "Mamba2AttnBackend.init_forward_metadata_out_graph, 0.5.13 to 0.5.13.post1",
        "64099a52af89": "LightningAttentionBackend.init_forward_metadata_out_graph, 0.5.13 to 0.5.16",
        "8758fa568273": "MambaAttnBackendBase._replay_metadata's header, 0.5.14",
        "ebf348a81c28": "MambaAttnBackendBase.init_forward_metadata_out_graph, 0.5.14",
        "f165b319a681": "Mamba2AttnBackend.init_forward_metadata_out_graph, 0.5.14",
        "b30fe5dc3e27": "MambaAttnBackendBase._replay_metadata's header, 0.5.15 to 0.5.23",
        "71f72c3f922d": "MambaAttnBackendBase.init_forward_metadata_out_graph, 0.5.15 to 0.5.23",
        "c80e64c312ff": "Mamba2AttnBackend.init_forward_metadata_out_graph, 0.5.15 to 0.5.16",
        "2802a5003a04": "Mamba2AttnBackend.init_forward_metadata_out_graph, 0.5.17 to 0.5.23",
        "b9a13dc8d35e": "LightningAttentionBackend.init_forward_metadata_out_graph, 0.5.17 to 0.5.23",
    },
    mitigations=DECODE_GRAPHS_OFF,
)
