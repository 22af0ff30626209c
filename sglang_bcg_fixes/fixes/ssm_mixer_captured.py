"""The Mamba2 mixer of Falcon-H1 is captured into the prefill graph

Symptom: Falcon-H1 answers wrongly with HTTP 200, logprobs are off by up to 1 or NaN, nothing is in the log. From 0.5.15
this needs no flag: breakable graphs are the default there.
Cause: The decoder layer has an attribute `attn`, so it passes the test for ordinary attention, and the call of its
mixer next to it has no graph break. Capture freezes the state slots, the metadata and the host's "is there a state yet"
of the dummy batch.
Change: A fix would run the mixer as a graph break, as NemotronH does. This version only watches for it.
Remove when: Every release that has to be served breaks the graph at this mixer, or refuses the model.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed, unknown

MODEL = "sglang.srt.models.falcon_h1"
BACKEND = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
MIXER = "Mamba2AttnBackend.forward"


def probe(source: Source) -> Finding:
    if not source.has_module(MODEL):
        return absent("this release has no Falcon-H1")
    layer = source.need(f"{MODEL}:FalconH1HybridAttentionDecoderLayer.forward")
    mixer = source.need(f"{BACKEND}:{MIXER}")
    for name in sorted(layer.calls):
        stem = name.rpartition(".")[2]
        if source.is_graph_break(MODEL, stem):
            return fixed(f"the layer calls {stem}, which is a graph break", layer, source.need(f"{MODEL}:{stem}"))
    if source.is_graph_break(BACKEND, MIXER):
        return fixed(f"{MIXER} is a graph break", layer, mixer)
    if "attn_backend.linear_attn_backend.forward" in layer.calls:
        return affected("the layer calls its Mamba2 mixer with no graph break between", layer, mixer)
    return unknown("the layer reaches its mixer in a way that no known release does", layer, mixer)


FIX = Fix(
    id="ssm_mixer_captured",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "4e5cb91f56cf": "FalconH1HybridAttentionDecoderLayer.forward, 0.5.11 to 0.5.12.post1",
        "33ec1d1466fd": "Mamba2AttnBackend.forward, 0.5.11 to 0.5.12.post1",
        "45cd82d18fa8": "FalconH1HybridAttentionDecoderLayer.forward, 0.5.13 to 0.5.15.post1",
        "579e2c3e8fb0": "Mamba2AttnBackend.forward, 0.5.13 to 0.5.14",
        "cc05066201b9": "Mamba2AttnBackend.forward, 0.5.15 to 0.5.15.post1",
        "e0c320b7c242": "FalconH1HybridAttentionDecoderLayer.forward, 0.5.16 to 0.5.20",
        "0cd36e90f6d5": "Mamba2AttnBackend.forward, 0.5.16",
        "f127c1dfead7": "Mamba2AttnBackend.forward, 0.5.17 to 0.5.19",
        "8e8296e7d7e7": "Mamba2AttnBackend.forward, 0.5.20 to 0.5.23",
        "6239d21dbed5": "FalconH1HybridAttentionDecoderLayer.forward, 0.5.21",
        "487153f38d12": "FalconH1HybridAttentionDecoderLayer.forward, 0.5.22 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
