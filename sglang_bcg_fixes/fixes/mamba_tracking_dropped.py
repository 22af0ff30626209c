"""Prefill graphs do not write the Mamba2 state that the prefix cache relies on

Symptom: NemotronH answers worse on the second and later runs of the same prompts, when prefixes are found in the cache:
GSM8K 0.965, then 0.900 to 0.920 in the upstream report. Needs the extra-buffer strategy of the Mamba prefix cache.
Cause: Mamba2 layers write a checkpoint of their state only if the batch carries mamba_track_mask. The batch that a
breakable replay hands them does not: never on 0.5.13, and from 0.5.14 not with speculative decoding. The scheduler
believes that the checkpoint was written and stores a slot with somebody else's state in the cache.
Change: A fix would run such a batch without a graph, or carry the fields. This version only watches for it.
Remove when: No release before 0.5.18 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, absent, affected, fixed, unknown

MIXER = "sglang.srt.layers.attention.hybrid_linear_attn_backend:Mamba2AttnBackend.forward"
OLD_RUNNER = "sglang.srt.model_executor.breakable_cuda_graph_runner:BreakableCudaGraphRunner._init_buffers"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner._is_mamba_track_enabled"


def probe(source: Source) -> Finding:
    mixer = source.need(MIXER)
    if not mixer.mentions("forward_batch.mamba_track_mask"):
        return absent("Mamba2 layers write no checkpoints in prefill", mixer)
    old = source.find(OLD_RUNNER)
    if old:
        if old.mentions("enable_mamba_track=False"):
            return affected("the breakable runner never carries mamba_track_mask", mixer, old)
        return unknown("the breakable runner allots its buffers in a way that no known release does", mixer, old)
    gate = source.need(RUNNER)
    if "self.model_runner.spec_algorithm.is_none" in gate.calls:
        return affected("the prefill runner carries no mamba_track_mask with speculative decoding", mixer, gate)
    return fixed("the prefill runner carries mamba_track_mask with and without speculative decoding", mixer, gate)


FIX = Fix(
    id="mamba_tracking_dropped",
    doc=__doc__,
    upstream=(
        "https://github.com/sgl-project/sglang/pull/31099",
        "https://github.com/sgl-project/sglang/pull/32606",
        "https://github.com/sgl-project/sglang/pull/34043",
    ),
    probe=probe,
    known={
        "33ec1d1466fd": "Mamba2AttnBackend.forward, 0.5.11 to 0.5.12.post1",
        "579e2c3e8fb0": "Mamba2AttnBackend.forward, 0.5.13 to 0.5.14",
        "c6e34d7fb7c0": "BreakableCudaGraphRunner._init_buffers, 0.5.13 to 0.5.13.post1",
        "695b7e72ae47": "PrefillCudaGraphRunner._is_mamba_track_enabled, 0.5.14 to 0.5.17",
        "cc05066201b9": "Mamba2AttnBackend.forward, 0.5.15 to 0.5.15.post1",
        "0cd36e90f6d5": "Mamba2AttnBackend.forward, 0.5.16",
        "f127c1dfead7": "Mamba2AttnBackend.forward, 0.5.17 to 0.5.19",
        "79e2f91eb457": "PrefillCudaGraphRunner._is_mamba_track_enabled, 0.5.18",
        "46f86b9f919f": "PrefillCudaGraphRunner._is_mamba_track_enabled, 0.5.19",
        "8e8296e7d7e7": "Mamba2AttnBackend.forward, 0.5.20 to 0.5.23",
        "c00fa2f2d487": "PrefillCudaGraphRunner._is_mamba_track_enabled, 0.5.20 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
